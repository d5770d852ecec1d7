cimport cython
from libc.string cimport memmove

from flowstone.native.words cimport Source, big32, byte, i32, i64, u8

cdef extern from *:
    """
    #include <poll.h>
    #include <sys/socket.h>
    #include <time.h>
    static inline int64_t load_now(void) {
        struct timespec moment;
        clock_gettime(CLOCK_MONOTONIC, &moment);
        return (int64_t)moment.tv_sec * 1000000000 + moment.tv_nsec;
    }
    static inline void load_wait(int32_t *polled, int64_t count) {
        poll((struct pollfd *)polled, (nfds_t)count, 1000);
    }
    static inline int64_t load_receive(int64_t file, void *buffer, int64_t room) {
        return recv((int)file, buffer, (size_t)room, MSG_DONTWAIT);
    }
    static inline int64_t load_transmit(int64_t file, const void *data, int64_t size) {
        return send((int)file, data, (size_t)size, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    """
    i64 now "load_now"() noexcept nogil
    void load_wait(i32* polled, i64 count) noexcept nogil
    i64 load_receive(i64 file, void* buffer, i64 room) noexcept nogil
    i64 load_transmit(i64 file, const void* data, i64 size) noexcept nogil

cpdef enum:
    POLLIN = 1
    POLLOUT = 4
    ENDED = 56
    DONE = 0
    CLOSED = 1
    SILENT = 2
    WRONG = 3
    FILLED = 0
    ANSWERED = 1
    SENT = 2
    HEARD = 3


cdef inline void wait(i32[:, ::1] polled) noexcept nogil:
    load_wait(&polled[0, 0], polled.shape[0])


cdef inline i64 receive(i64 file, u8[:, ::1] buffers, i64 connection, i64 at) noexcept nogil:
    return load_receive(file, &buffers[connection, at], buffers.shape[1] - at)


cdef inline i64 transmit(i64 file, const u8[::1] blob, i64 at, i64 end) noexcept nogil:
    return load_transmit(file, &blob[at], end - at)


cdef inline Source buffer(u8[:, ::1] buffers, i64 connection) noexcept nogil:
    return &buffers[connection, 0]


cdef inline void move_down(u8[:, ::1] buffers, i64 connection, i64 at, i64 end) noexcept nogil:
    if end > at:
        memmove(&buffers[connection, 0], &buffers[connection, at], end - at)


cdef (i64, i64) _whole(Source data, i64 end, i64 answer_size) noexcept nogil
@cython.locals(total=i64)
cpdef (i64, i64, i64, i64) drive(
    i32[:, ::1] polled,
    i64[:, ::1] connections,
    i64[::1] ends,
    const u8[::1] blob,
    const i64[::1] edges,
    i64 window,
    i64 answer_size,
    u8[:, ::1] buffers,
    i64[::1] pauses,
    i64 silence,
) noexcept
