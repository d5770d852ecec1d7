from flowstone.limestone.format.entry_table cimport (
    AT,
    BLOB_COUNT,
    END,
    FULL,
    KEY_AT,
    KEY_END,
    MAJOR,
    MINOR,
    NEED,
    OTHER,
    STORAGE_ID,
    TYPE,
    VALUE_AT,
    VALUE_END,
)
from flowstone.native.words cimport byte, i64, little32, little64, source, u8, u64

cpdef (i64, i64, i64) walk_table(const u8[::1] buf, i64 at, u64[:, ::1] table, i64 count) noexcept
