"""What other compiled modules may use of entries.pyx: a `Probe` is a key in C, for the methods that take one."""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t

cdef enum:
    CAPACITY = 64  # entries of a leaf, or children of an inner node
    DEPTH_MAX = 24  # a tree of this depth would have more than 2^64 entries

# A key as (hint, slot): the order of hints is that of the keys, and slots decide between equal hints.
# - A number: the hint is the number as int64 with the sign bit flipped, so that hints compare as unsigned. Above
#   2^63 - 1, which has the greatest hint, the slot is the distance from 2^63 - 1; else 0.
# - Text: the hint is the first 8 bytes as a big-endian number, padded with zeros. The slot of up to 8 bytes is twice
#   their number plus 1; the slot of a longer key is the address of its `Rest`. In a probe, `rest` has these bytes.
cdef struct Probe:
    uint64_t hint
    uint64_t slot
    const unsigned char *rest
    size_t rest_size
    bint is_text

# `slots` and `sizes` follow the node in memory; leaves have no `sizes`, and leaves of numbers have no `slots` before one
# of their numbers needs one. An inner node has in `sizes` the number of entries below each child, and in hints and slots
# a lower bound of each child's keys; the bound of its first child is never used.
cdef struct Node:
    int count
    int level  # 0 is a leaf
    Node *previous  # of leaves
    Node *next
    uint64_t *slots
    size_t *sizes
    uint64_t hints[CAPACITY]
    void *items[CAPACITY]  # tuples, or children


cdef inline void probe_integer(Probe *probe, int64_t number) noexcept nogil:
    probe.hint = <uint64_t> number ^ (<uint64_t> 1 << 63)
    probe.slot = 0
    probe.is_text = False


cdef inline void probe_unsigned(Probe *probe, uint64_t number) noexcept nogil:
    if number >> 63:
        probe.hint = ~<uint64_t> 0
        probe.slot = number - ((<uint64_t> 1 << 63) - 1)
        probe.is_text = False
    else:
        probe_integer(probe, <int64_t> number)


cdef inline void probe_text(Probe *probe, const unsigned char *text, size_t size) noexcept nogil:
    """`text` must outlive the probe."""
    cdef size_t at
    cdef size_t head = size if size < 8 else 8
    cdef uint64_t hint = 0
    for at in range(head):
        hint |= <uint64_t> text[at] << (56 - 8 * at)
    probe.hint = hint
    probe.is_text = True
    if size <= 8:
        probe.slot = 2 * size + 1
        probe.rest_size = 0
    else:
        probe.slot = 0
        probe.rest = text + 8
        probe.rest_size = size - 8


cdef class Entries:
    cdef readonly bint is_text
    cdef Node *root  # NULL if there are no entries
    cdef size_t size
    cdef uint64_t version  # changes with every key that is added or removed

    cdef PyObject *find(self, const Probe *probe) noexcept  # borrowed; NULL if there is no such key
    cdef object store(self, const Probe *probe, bytes raw)  # the old tuple, or None
    cdef bint add(self, const Probe *probe, bytes raw) except -1  # False, with nothing done, if the key exists
    cdef object remove(self, const Probe *probe)  # the old tuple, or None
    cdef size_t rank_of(self, const Probe *probe) noexcept  # the number of smaller keys
    cdef Node *locate(self, size_t number, int *at) noexcept  # the leaf of the entry with this number, and its place there

    cdef Node *_descend(self, const Probe *probe, Node **path, int *places) noexcept
    cdef object _put(self, const Probe *probe, bytes raw, bint replaces)
    cdef int _split_path(self, const Probe *probe) except -1
    cdef int _split_child(self, Node *parent, int place, const Probe *probe) except -1
    cdef void _shrink(self, Node **path, int *places) noexcept
    cdef int _probe(self, object key, Probe *probe) except -1
    cdef int _probe_to_store(self, object key, object raw, Probe *probe) except -1
    cdef size_t _edge(self, object key, size_t unbounded) except? 0
    cdef object _key_at(self, Node *leaf, int at)

    cpdef bytes get(self, object key)
    cpdef bytes put(self, object key, bytes raw)
    cpdef bytes pop(self, object key)
    cpdef list collect(self, object low=*, object high=*, bint reverse=*, size_t offset=*, size_t limit=*)
    cpdef size_t count(self, object low=*, object high=*) except? 0
    cpdef size_t rank(self, object key) except? 0
    cpdef tuple at(self, size_t number)
