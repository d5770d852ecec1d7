from flowstone.native.words cimport copy, i64, poke, poke64, source, target, u8, u64, word

cpdef i64 pack_puts(
    u8[::1] out,
    const u8[::1] keys,
    const i64[::1] key_sizes,
    const u8[::1] values,
    const i64[::1] value_sizes,
    u64 storage_id,
    u64 major,
    u64 first_minor,
) noexcept
