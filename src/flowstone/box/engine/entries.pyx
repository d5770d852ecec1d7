"""Compiled: the entries of one index, a B+-tree from keys to tuples. `entries.py` is the interpreted form.

Theory of operation: leaves have the entries in order, each with the tuple, an 8-byte hint of its key, and the rest of
the key where the hint is not all of it (`Probe` in entries.pxd). Inner nodes have a lower bound of the keys below each
child and the number of entries there, so a key, its rank and the entry with a given rank are found in one descent.

An insertion into a full leaf splits the full nodes on the path from the root down; each split leaves a valid tree, so
an allocation that fails loses nothing. A node that is full is split in the middle, but an insertion at its end or
beginning takes the last or the first cell only: keys in order fill all leaves. A full leaf that keys in any order enter
moves some of them to a neighbor first, if one has room, so most leaves are well filled. A removal frees an empty node, and
merges nodes that together fill less than three quarters of one; so no node but the root is ever empty.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_AsUnsignedLongLong
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_RawFree, PyMem_RawMalloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memmove, memset

from flowstone.box.engine.entries cimport CAPACITY, DEPTH_MAX, Entries, Node, Probe, probe_integer, probe_text, probe_unsigned

cdef extern from *:
    void prefetch "__builtin_prefetch"(const void *address) noexcept nogil

cdef enum:
    MERGED_MAX = 48  # cells of two nodes that are merged: some room is left, or the next insertion would split again
    SHARED_MAX = 54  # cells of a leaf that takes some of a full neighbor: fewer would move for too few insertions
    NO_BOUND = 1  # the slot of a bound that is not used

cdef enum Fit:
    FITS, TOO_SMALL, TOO_GREAT

# The bytes of a key after those in its hint.
cdef struct Rest:
    uint32_t size
    unsigned char data[1]


# --- keys ---


cdef inline int compare_slot(uint64_t slot, const Probe *probe) noexcept nogil:
    """Compare a key that has the probe's hint with the probe: negative if the key is less."""
    cdef Rest *rest
    cdef size_t common
    cdef int order
    if not probe.is_text or (slot & 1 and probe.slot):
        return -1 if slot < probe.slot else slot > probe.slot
    if slot & 1:
        return -1  # the shorter one, which the longer one begins with, but for zeros
    if probe.slot:
        return 1
    rest = <Rest *> slot
    common = rest.size if rest.size < probe.rest_size else probe.rest_size
    order = memcmp(rest.data, probe.rest, common)
    if order:
        return order
    return -1 if rest.size < probe.rest_size else rest.size > probe.rest_size


cdef uint64_t stored_slot(const Probe *probe) except 0xFFFFFFFFFFFFFFFF:
    """Return the slot to store for the key; the caller owns it."""
    cdef Rest *rest
    if not probe.is_text or probe.slot:
        return probe.slot
    if probe.rest_size > 0xFFFFFFF0:
        raise OverflowError(f"a key of {probe.rest_size} bytes and more is too long")
    rest = <Rest *> PyMem_Malloc(sizeof(uint32_t) + probe.rest_size)
    if rest == NULL:
        raise MemoryError
    rest.size = <uint32_t> probe.rest_size
    memcpy(rest.data, probe.rest, probe.rest_size)
    return <uint64_t> rest


cdef inline void free_slot(bint is_text, uint64_t slot) noexcept:
    if is_text and not slot & 1:
        PyMem_Free(<void *> slot)


cdef void probe_stored(Probe *probe, bint is_text, uint64_t hint, uint64_t slot) noexcept nogil:
    """Make a probe of a stored key; it is valid as long as the key is stored."""
    cdef Rest *rest
    probe.hint = hint
    probe.slot = slot
    probe.is_text = is_text
    probe.rest_size = 0
    if is_text and not slot & 1:
        rest = <Rest *> slot
        probe.slot = 0
        probe.rest = rest.data
        probe.rest_size = rest.size


cdef object python_key(bint is_text, uint64_t hint, uint64_t slot):
    cdef Rest *rest = NULL
    cdef Py_ssize_t size
    cdef Py_ssize_t head
    cdef unsigned char *text
    if not is_text:
        if slot:
            return slot + ((<uint64_t> 1 << 63) - 1)
        return <int64_t> (hint ^ (<uint64_t> 1 << 63))
    if slot & 1:
        head = size = <Py_ssize_t> (slot >> 1)
    else:
        rest = <Rest *> slot
        head = <Py_ssize_t> head_size(hint)
        size = head + <Py_ssize_t> rest.size
    key = PyBytes_FromStringAndSize(NULL, size)
    text = <unsigned char *> PyBytes_AS_STRING(key)
    write_head(text, head, hint)
    if rest != NULL:
        memcpy(text + head, rest.data, rest.size)
    return key


cdef void write_head(unsigned char *text, Py_ssize_t size, uint64_t hint) noexcept nogil:
    """Write the first bytes of a key, which are in its hint."""
    cdef unsigned char head[16]
    cdef uint64_t form = hint >> 54
    if form >> 2 != INTEGER_PART:
        put_big_endian(head, hint)
    else:
        head[0] = INTEGER_PART
        memset(head + 1, 0, 5)
        put_big_endian(head + (6 if form & 3 == 0 else (3 if form & 3 == 1 else 1)), hint << 10)
    memcpy(text, head, <size_t> size)


cdef inline void put_big_endian(unsigned char *text, uint64_t number) noexcept nogil:
    cdef int at
    for at in range(8):
        text[at] = <unsigned char> (number >> (56 - 8 * at))


# --- nodes ---


cdef Node *new_node(int level, bint is_text) except NULL:
    cdef size_t size = sizeof(Node)
    cdef Node *node
    if level or is_text:
        size += CAPACITY * sizeof(uint64_t)
    if level:
        size += CAPACITY * sizeof(size_t)
    node = <Node *> PyMem_RawMalloc(size)
    if node == NULL:
        raise MemoryError
    node.count = 0
    node.level = level
    node.previous = node.next = NULL
    node.slots = <uint64_t *> (node + 1) if level or is_text else NULL
    node.sizes = <size_t *> (node.slots + CAPACITY) if level else NULL
    return node


cdef bint has_room_for_slots(Node *node) noexcept:
    """Give a leaf of numbers its slots; return False if there is no memory for them."""
    if node.slots == NULL:
        node.slots = <uint64_t *> PyMem_RawMalloc(CAPACITY * sizeof(uint64_t))
        if node.slots == NULL:
            return False
        memset(node.slots, 0, CAPACITY * sizeof(uint64_t))
    return True


cdef void free_node(Node *node) noexcept:
    """Free the node, not what its cells have."""
    if node.slots != NULL and node.slots != <uint64_t *> (node + 1):
        PyMem_RawFree(node.slots)
    PyMem_RawFree(node)


cdef void free_tree(Node *node, bint is_text) noexcept:
    cdef int at
    for at in range(node.count):
        if node.slots != NULL:
            free_slot(is_text, node.slots[at])
        if node.level:
            free_tree(<Node *> node.items[at], is_text)
        else:
            Py_DECREF(<object> node.items[at])
    free_node(node)


cdef inline uint64_t slot_of(const Node *node, int at) noexcept nogil:
    return node.slots[at] if node.slots != NULL else 0


cdef void move_cells(Node *node, int start, int to) noexcept nogil:
    """Move the cells from `start` on to `to`; the count changes with them."""
    cdef size_t count = <size_t> (node.count - start)
    memmove(node.hints + to, node.hints + start, count * sizeof(uint64_t))
    memmove(node.items + to, node.items + start, count * sizeof(void *))
    if node.slots != NULL:
        memmove(node.slots + to, node.slots + start, count * sizeof(uint64_t))
    if node.sizes != NULL:
        memmove(node.sizes + to, node.sizes + start, count * sizeof(size_t))
    node.count += to - start


cdef void copy_cells(Node *node, int at, const Node *source, int start, int count) noexcept nogil:
    """Copy cells of `source` over those at `at`. `node` must have slots if `source` has."""
    memcpy(node.hints + at, source.hints + start, <size_t> count * sizeof(uint64_t))
    memcpy(node.items + at, source.items + start, <size_t> count * sizeof(void *))
    if source.slots != NULL:
        memcpy(node.slots + at, source.slots + start, <size_t> count * sizeof(uint64_t))
    elif node.slots != NULL:
        memset(node.slots + at, 0, <size_t> count * sizeof(uint64_t))
    if source.sizes != NULL:
        memcpy(node.sizes + at, source.sizes + start, <size_t> count * sizeof(size_t))


cdef void append_cells(Node *node, const Node *source, int start, int count) noexcept nogil:
    """Append cells of `source`. `node` must have slots if `source` has."""
    copy_cells(node, node.count, source, start, count)
    node.count += count


cdef void set_cell(Node *node, int at, uint64_t hint, uint64_t slot, void *item) noexcept nogil:
    """Insert a cell. A node without slots takes the slot 0 only."""
    move_cells(node, at, at + 1)
    node.hints[at] = hint
    node.items[at] = item
    if node.slots != NULL:
        node.slots[at] = slot


cdef void drop_child(Node *parent, int place, bint is_text) noexcept:
    """Remove the cell of a child, and free the child, whose cells are gone."""
    cdef Node *child = <Node *> parent.items[place]
    if child.previous != NULL:
        child.previous.next = child.next
    if child.next != NULL:
        child.next.previous = child.previous
    free_node(child)
    free_slot(is_text, parent.slots[place])
    move_cells(parent, place + 1, place)


cdef bint merge_with_next(Node *parent, int place, bint is_text) noexcept:
    """Append the cells of the next child to those of this one, if they have room; return True if so."""
    cdef Node *left = <Node *> parent.items[place]
    cdef Node *right
    cdef int middle = left.count
    # Of leaves the parent knows the number of cells, so full neighbors need not be read.
    if parent.level == 1 and parent.sizes[place] + parent.sizes[place + 1] > MERGED_MAX:
        return False
    right = <Node *> parent.items[place + 1]
    if left.count + right.count > MERGED_MAX or (right.slots != NULL and not has_room_for_slots(left)):
        return False
    append_cells(left, right, 0, right.count)
    if right.level:
        # The first bound of the right node was not used; now it is, and its parent has it.
        free_slot(is_text, left.slots[middle])
        left.hints[middle] = parent.hints[place + 1]
        left.slots[middle] = parent.slots[place + 1]
        parent.slots[place + 1] = NO_BOUND
    parent.sizes[place] += parent.sizes[place + 1]
    drop_child(parent, place + 1, is_text)
    return True


# --- search ---


cdef inline int below(const uint64_t *hints, int count, uint64_t hint) noexcept nogil:
    """Return how many of the sorted hints are less than `hint`."""
    cdef const uint64_t *first = hints
    cdef int half
    if count <= 0:
        return 0
    while count > 1:
        half = count >> 1
        first += half if first[half - 1] < hint else 0
        count -= half
    return <int> (first - hints) + (first[0] < hint)


cdef inline int first_cell(const Node *node, int at, const Probe *probe, int is_above) noexcept nogil:
    """Return the first cell from `at` on whose key is not less than the probe; with `is_above`, greater than it."""
    cdef int end, middle
    at += below(node.hints + at, node.count - at, probe.hint)
    if at == node.count or node.hints[at] != probe.hint:
        return at
    end = node.count
    if node.hints[end - 1] != probe.hint:
        end = at + below(node.hints + at, end - at, probe.hint + 1)
    while at < end:
        middle = (at + end) >> 1
        if compare_slot(slot_of(node, middle), probe) < is_above:
            at = middle + 1
        else:
            end = middle
    return at


cdef inline int child_of(const Node *node, const Probe *probe) noexcept nogil:
    """Return the place of the child that has the probe's key, or would have it."""
    return first_cell(node, 1, probe, True) - 1


cdef inline Node *child_at(const Node *node, int place) noexcept nogil:
    """Return a child, whose hints will be searched: fetching them together takes as long as fetching one of them."""
    cdef const char *child = <const char *> node.items[place]
    cdef int line
    for line in range(9):
        prefetch(child + 64 * line)
    return <Node *> child


cdef inline bint is_at(const Node *leaf, int at, const Probe *probe) noexcept nogil:
    return at < leaf.count and leaf.hints[at] == probe.hint and compare_slot(slot_of(leaf, at), probe) == 0


cdef inline size_t sum_of(const size_t *sizes, int count) noexcept nogil:
    cdef size_t total = 0
    cdef int at
    for at in range(count):
        total += sizes[at]
    return total


@cython.final
cdef class Entries:
    """Distinct keys in order, each with its tuple. Keys are bytes if `is_text`, else numbers from -2^63 to 2^64 - 1."""

    def __cinit__(self, bint is_text):
        self.is_text = is_text
        self.root = NULL
        self.size = 0
        self.version = 0

    def __dealloc__(self):
        if self.root != NULL:
            free_tree(self.root, self.is_text)

    def __len__(self):
        return self.size

    def __contains__(self, key):
        cdef Probe probe
        return self._probe(key, &probe) == FITS and self.find(&probe) != NULL

    # --- for callers in Python ---

    cpdef bytes get(self, object key):
        """Return the tuple at `key`; None if there is none."""
        cdef Probe probe
        cdef PyObject *found
        if self._probe(key, &probe) != FITS:
            return None
        found = self.find(&probe)
        return <bytes> found if found != NULL else None

    cpdef bytes put(self, object key, bytes raw):
        """Store the tuple `raw` at `key`; return the old tuple."""
        cdef Probe probe
        self._probe_to_store(key, raw, &probe)
        return self.store(&probe, raw)

    cpdef bytes pop(self, object key):
        """Remove the entry at `key`; return its tuple."""
        cdef Probe probe
        return self.remove(&probe) if self._probe(key, &probe) == FITS else None

    def span(self, object low=None, object high=None, bint reverse=False):
        """Iterate over the entries from `low` (inclusive) to `high` (exclusive), as pairs of key and tuple.

        After a change the iterator continues after the last key that it returned.
        """
        cdef Span span = Span.__new__(Span)
        span.entries = self
        span.low = low
        span.high = high
        span.reverse = reverse
        span.seek()
        return span

    cpdef list collect(
        self, object low=None, object high=None, bint reverse=False, size_t offset=0, size_t limit=<size_t> -1
    ):
        """Return up to `limit` tuples of the range as a list, without the first `offset` ones."""
        cdef size_t first = self._edge(low, 0)
        cdef size_t end = self._edge(high, self.size)
        cdef list found = []
        cdef Node *leaf
        cdef int at = 0
        if end <= first or end - first <= offset:
            return found
        limit = min(limit, end - first - offset)
        leaf = self.locate(end - 1 - offset if reverse else first + offset, &at)
        while limit:
            found.append(<object> leaf.items[at])
            limit -= 1
            leaf = step(leaf, &at, reverse)
        return found

    cpdef size_t count(self, object low=None, object high=None) except? 0:
        """Return the number of entries from `low` (inclusive) to `high` (exclusive)."""
        cdef size_t first = self._edge(low, 0)
        cdef size_t end = self._edge(high, self.size)
        return end - first if end > first else 0

    cpdef size_t rank(self, object key) except? 0:
        """Return the number of keys less than `key`, which may be missing."""
        return self._edge(key, 0)

    cpdef tuple at(self, size_t number):
        """Return the key and the tuple of the entry with this number, counted from the smallest key."""
        cdef int at = 0
        cdef Node *leaf
        if number >= self.size:
            raise IndexError(f"there are {self.size} entries, none has the number {number}")
        leaf = self.locate(number, &at)
        return self._key_at(leaf, at), <object> leaf.items[at]

    # --- for callers in C ---

    cdef PyObject *find(self, const Probe *probe) noexcept:
        cdef Node *node = self.root
        cdef int at
        if node == NULL:
            return NULL
        while node.level:
            node = child_at(node, child_of(node, probe))
        at = first_cell(node, 0, probe, False)
        return <PyObject *> node.items[at] if is_at(node, at, probe) else NULL

    cdef object store(self, const Probe *probe, bytes raw):
        return self._put(probe, raw, True)

    cdef bint add(self, const Probe *probe, bytes raw) except -1:
        return self._put(probe, raw, False) is None

    cdef object remove(self, const Probe *probe):
        cdef Node *path[DEPTH_MAX]
        cdef int places[DEPTH_MAX]
        cdef Node *leaf
        cdef int at, depth
        if self.root == NULL:
            return None
        leaf = self._descend(probe, path, places)
        at = first_cell(leaf, 0, probe, False)
        if not is_at(leaf, at, probe):
            return None
        old = <object> leaf.items[at]
        Py_DECREF(old)
        free_slot(self.is_text, slot_of(leaf, at))
        move_cells(leaf, at + 1, at)
        for depth in range(self.root.level):
            path[depth].sizes[places[depth]] -= 1
        self.size -= 1
        self.version += 1
        self._shrink(path, places)
        return old

    cdef size_t rank_of(self, const Probe *probe) noexcept:
        cdef Node *node = self.root
        cdef size_t rank = 0
        cdef int place
        if node == NULL:
            return 0
        while node.level:
            place = child_of(node, probe)
            rank += sum_of(node.sizes, place)
            node = <Node *> node.items[place]
        return rank + <size_t> first_cell(node, 0, probe, False)

    cdef Node *locate(self, size_t number, int *at) noexcept:
        cdef Node *node = self.root
        cdef int place
        while node.level:
            place = 0
            while number >= node.sizes[place]:
                number -= node.sizes[place]
                place += 1
            node = <Node *> node.items[place]
        at[0] = <int> number
        return node

    # --- inside ---

    cdef Node *_descend(self, const Probe *probe, Node **path, int *places) noexcept:
        """Return the leaf of the key, with the inner nodes above it, and which child of each."""
        cdef Node *node = self.root
        cdef int depth = 0
        while node.level:
            path[depth] = node
            places[depth] = child_of(node, probe)
            node = child_at(node, places[depth])
            depth += 1
        return node

    cdef object _put(self, const Probe *probe, bytes raw, bint replaces):
        """Store `raw` if the key is new, or `replaces`; return the tuple that the key had."""
        cdef Node *path[DEPTH_MAX]
        cdef int places[DEPTH_MAX]
        cdef Node *leaf
        cdef int at, depth
        cdef uint64_t slot
        if self.root == NULL:
            self.root = new_node(0, self.is_text)
        leaf = self._descend(probe, path, places)
        at = first_cell(leaf, 0, probe, False)
        if is_at(leaf, at, probe):
            old = <object> leaf.items[at]
            if replaces:
                Py_INCREF(raw)
                leaf.items[at] = <void *> raw
                Py_DECREF(old)
            return old
        if leaf.count == CAPACITY:
            self._split_path(probe)
            leaf = self._descend(probe, path, places)
            at = first_cell(leaf, 0, probe, False)
        slot = stored_slot(probe)
        if slot and not has_room_for_slots(leaf):
            raise MemoryError
        Py_INCREF(raw)
        set_cell(leaf, at, probe.hint, slot, <void *> raw)
        for depth in range(self.root.level):
            path[depth].sizes[places[depth]] += 1
        self.size += 1
        self.version += 1
        return None

    cdef int _split_path(self, const Probe *probe) except -1:
        """Split the full nodes from the root to the leaf of the key."""
        cdef Node *node = self.root
        cdef int place
        if node.count == CAPACITY:
            node = new_node(self.root.level + 1, self.is_text)
            set_cell(node, 0, 0, NO_BOUND, self.root)
            node.sizes[0] = self.size
            self.root = node
        while node.level:
            place = child_of(node, probe)
            if (<Node *> node.items[place]).count == CAPACITY:
                if node.level > 1 or not self._share(node, place, probe):
                    self._split_child(node, place, probe)
                place = child_of(node, probe)
            node = <Node *> node.items[place]
        return 0

    cdef bint _share(self, Node *parent, int place, const Probe *probe) except -1:
        """Move cells of a full leaf to a neighbor with room; return False if there is none, or keys come in order."""
        cdef Node *leaf = <Node *> parent.items[place]
        cdef Node *neighbor
        cdef int at = first_cell(leaf, 0, probe, False)
        cdef int other = place + 1
        cdef int cut, count, between
        cdef uint64_t slot
        if at == 0 or at == CAPACITY:
            return False
        if other == parent.count or parent.sizes[other] > SHARED_MAX:
            other = place - 1
            if other < 0 or parent.sizes[other] > SHARED_MAX:
                return False
        neighbor = <Node *> parent.items[other]
        if leaf.slots != NULL and not has_room_for_slots(neighbor):
            raise MemoryError
        count = (CAPACITY - neighbor.count) // 2
        cut = CAPACITY - count if other > place else count
        between = other if other > place else place
        slot = self._slot_again(leaf, cut)
        free_slot(self.is_text, parent.slots[between])
        parent.slots[between] = slot
        parent.hints[between] = leaf.hints[cut]
        if other > place:
            move_cells(neighbor, 0, count)
            copy_cells(neighbor, 0, leaf, cut, count)
            leaf.count = cut
        else:
            append_cells(neighbor, leaf, 0, count)
            move_cells(leaf, count, 0)
        parent.sizes[place] -= <size_t> count
        parent.sizes[other] += <size_t> count
        return True

    cdef uint64_t _slot_again(self, const Node *leaf, int at) except? 0:
        """Return the slot for a bound that is equal to a stored key."""
        cdef Probe bound
        probe_stored(&bound, self.is_text, leaf.hints[at], slot_of(leaf, at))
        return stored_slot(&bound)

    cdef int _split_child(self, Node *parent, int place, const Probe *probe) except -1:
        """Move the greater cells of a full child into a new node after it."""
        cdef Node *left = <Node *> parent.items[place]
        cdef Node *right
        cdef uint64_t slot
        cdef size_t moved
        cdef int first = 1 if left.level else 0
        cdef int at = child_of(left, probe) + 1 if left.level else first_cell(left, 0, probe, False)
        cdef int cut = CAPACITY - 1 if at == CAPACITY else (1 if at == first else CAPACITY // 2)
        slot = left.slots[cut] if left.level else self._slot_again(left, cut)
        try:
            right = new_node(left.level, self.is_text)
        except MemoryError:
            if not left.level:
                free_slot(self.is_text, slot)
            raise
        if left.slots != NULL and not has_room_for_slots(right):
            free_node(right)
            raise MemoryError
        append_cells(right, left, cut, CAPACITY - cut)
        left.count = cut
        if left.level:
            right.slots[0] = NO_BOUND
            moved = sum_of(right.sizes, right.count)
        else:
            moved = <size_t> right.count
            right.previous = left
            right.next = left.next
            if left.next != NULL:
                left.next.previous = right
            left.next = right
        set_cell(parent, place + 1, right.hints[0], slot, right)
        parent.sizes[place + 1] = moved
        parent.sizes[place] -= moved
        return 0

    cdef void _shrink(self, Node **path, int *places) noexcept:
        """After a removal from a leaf: free and merge nodes along its path."""
        cdef int depth, place
        cdef Node *parent
        cdef Node *child
        for depth in range(self.root.level - 1, -1, -1):
            parent = path[depth]
            place = places[depth]
            child = <Node *> parent.items[place]
            if child.count == 0:
                drop_child(parent, place, self.is_text)
            elif not (
                (place + 1 < parent.count and merge_with_next(parent, place, self.is_text))
                or (place > 0 and merge_with_next(parent, place - 1, self.is_text))
            ):
                break
        while self.root != NULL and self.root.count <= (1 if self.root.level else 0):
            child = <Node *> self.root.items[0] if self.root.count else NULL
            if self.root.count and self.root.slots != NULL:
                free_slot(self.is_text, self.root.slots[0])
            free_node(self.root)
            self.root = child

    cdef int _probe(self, object key, Probe *probe) except -1:
        """Return a `Fit`. The probe of a number outside of the range is the end of the range on its side."""
        cdef int overflow = 0
        cdef int64_t number
        if self.is_text:
            if type(key) is not bytes:
                raise TypeError(f"keys of this index are bytes, not {type(key).__name__}")
            probe_text(probe, <const unsigned char *> PyBytes_AS_STRING(key), <size_t> PyBytes_GET_SIZE(key))
            return FITS
        if not isinstance(key, int):
            raise TypeError(f"keys of this index are numbers, not {type(key).__name__}")
        number = PyLong_AsLongLongAndOverflow(key, &overflow)
        if not overflow:
            probe_integer(probe, number)
            return FITS
        if overflow < 0:
            probe_integer(probe, <int64_t> (<uint64_t> 1 << 63))
            return TOO_SMALL
        try:
            probe_unsigned(probe, PyLong_AsUnsignedLongLong(key))
            return FITS
        except OverflowError:
            probe_unsigned(probe, ~<uint64_t> 0)
            probe.slot += 1
            return TOO_GREAT

    cdef int _probe_to_store(self, object key, object raw, Probe *probe) except -1:
        if type(raw) is not bytes:
            raise TypeError(f"a tuple is bytes, not {type(raw).__name__}")
        if self._probe(key, probe) != FITS:
            raise OverflowError(f"key {key} is not in the range of -2^63 to 2^64 - 1")
        return 0

    cdef size_t _edge(self, object key, size_t unbounded) except? 0:
        """Return the number of keys less than the bound `key`, or `unbounded` for None."""
        cdef Probe probe
        if key is None:
            return unbounded
        self._probe(key, &probe)
        return self.rank_of(&probe)

    cdef object _key_at(self, Node *leaf, int at):
        return python_key(self.is_text, leaf.hints[at], slot_of(leaf, at))


cdef inline Node *step(Node *leaf, int *at, bint reverse) noexcept nogil:
    """Return the leaf and place of the next entry in this direction; NULL after the last one."""
    if not reverse:
        at[0] += 1
        if at[0] == leaf.count:
            leaf = leaf.next
            at[0] = 0
    elif at[0]:
        at[0] -= 1
    else:
        leaf = leaf.previous
        at[0] = leaf.count - 1 if leaf != NULL else 0
    return leaf


@cython.final
cdef class Span:
    """Iterates over a range of entries. Its leaf and place are valid as long as the entries have the same version."""

    cdef Entries entries
    cdef object low, high, last
    cdef bint reverse
    cdef Node *leaf
    cdef int place
    cdef size_t left  # entries that remain
    cdef uint64_t version

    cdef int seek(self) except -1:
        """Find the first entry, or the one after `last`."""
        cdef size_t first, end
        cdef Entries entries = self.entries
        self.version = entries.version
        if self.last is None:
            first, end = entries._edge(self.low, 0), entries._edge(self.high, entries.size)
        elif self.reverse:
            first, end = entries._edge(self.low, 0), entries._edge(self.last, 0)
        else:
            first, end = entries._edge(self.last, 0) + (self.last in entries), entries._edge(self.high, entries.size)
        self.left = end - first if end > first else 0
        if self.left:
            self.leaf = entries.locate(end - 1 if self.reverse else first, &self.place)
        return 0

    def __iter__(self):
        return self

    def __next__(self):
        cdef Node *leaf
        cdef int place
        if self.version != self.entries.version:
            self.seek()
        if not self.left:
            raise StopIteration
        leaf = self.leaf
        place = self.place
        key = self.entries._key_at(leaf, place)
        raw = <object> leaf.items[place]
        self.last = key
        self.left -= 1
        self.leaf = step(leaf, &self.place, self.reverse)
        return key, raw
