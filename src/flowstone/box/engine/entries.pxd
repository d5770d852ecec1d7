"""What other compiled modules may use of entries.pyx: a `Probe` is a key in C, for the methods that take one."""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t

cdef enum:
    CAPACITY = 64  # entries of a leaf, or children of an inner node
    INTEGER_PART = 0x40  # the byte before an integer that is not negative, in keys of several parts
    DEPTH_MAX = 24  # a tree of this depth would have more than 2^64 entries

# A key as (hint, slot): the order of hints is that of the keys, and slots decide between equal hints.
# - A number: the hint is the number as int64 with the sign bit flipped, so that hints compare as unsigned. Above
#   2^63 - 1, which has the greatest hint, the slot is the distance from 2^63 - 1; else 0.
# - Text: the hint is the first 8 bytes as a big-endian number, padded with zeros. After the byte of an integer part
#   (`key_encoding.py`), whose number begins with zeros nearly always, the hint has this byte, 2 bits for the size of the
#   number, and as much of it and of the next bytes as fits. `head_size` is the number of bytes that are wholly in the
#   hint. The slot of a key without more bytes is twice its size plus 1; the slot of a longer key is the address of its
#   `Rest`. In a probe, `rest` has the bytes of it.
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


cdef inline uint64_t big_endian(const unsigned char *text, size_t size, size_t at, size_t end) noexcept nogil:
    """Return the bytes from `at` to `end` as a number; zeros stand for those after the text."""
    cdef uint64_t number = 0
    while at < end:
        number = number << 8 | (text[at] if at < size else 0)
        at += 1
    return number


cdef inline uint64_t text_hint(const unsigned char *text, size_t size) noexcept nogil:
    """Return the hint of a text; that of a greater text is never less."""
    cdef uint64_t number
    if size == 0 or text[0] != INTEGER_PART:
        return big_endian(text, size, 0, 8)
    number = big_endian(text, size, 1, 9)
    if number < 1 << 24:
        number = number << 30 | big_endian(text, size, 9, 13) >> 2
    elif number < <uint64_t> 1 << 48:
        number = <uint64_t> 1 << 54 | number << 6 | big_endian(text, size, 9, 10) >> 2
    else:
        number = <uint64_t> 2 << 54 | number >> 10
    return <uint64_t> INTEGER_PART << 56 | number


cdef inline size_t head_size(uint64_t hint) noexcept nogil:
    cdef uint64_t form = hint >> 54
    if form >> 2 != INTEGER_PART:
        return 8
    return 12 if form & 3 == 0 else (9 if form & 3 == 1 else 7)


cdef inline void probe_text(Probe *probe, const unsigned char *text, size_t size) noexcept nogil:
    """`text` must outlive the probe."""
    cdef size_t head
    probe.hint = text_hint(text, size)
    probe.is_text = True
    head = head_size(probe.hint)
    if size <= head:
        probe.slot = 2 * size + 1
        probe.rest_size = 0
    else:
        probe.slot = 0
        probe.rest = text + head
        probe.rest_size = size - head


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
    cdef bint _share(self, Node *parent, int place, const Probe *probe) except -1
    cdef uint64_t _slot_again(self, const Node *leaf, int at) except? 0
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
