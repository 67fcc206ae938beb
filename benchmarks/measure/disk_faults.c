/* Faults of a disk and of a clock, for a process that has this library in LD_PRELOAD.

Calls that change files below one folder are counted. At the n-th the process is killed, or the call fails: once, or
from then on. The clock can jump at its n-th reading. `chaos_arm` and `chaos_jump` set the next fault of the process,
and the counters that they are given, in memory shared with the parent, say what has happened. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { CREATE = 1, WRITE = 2, SYNC = 4, RENAME = 8, REMOVE = 16, READ = 32 };
enum { KILL_BEFORE = -1, KILL_AFTER = -2 };

static char folder[PATH_MAX];
static long fault_at, kinds, lasting; /* the fault's call, the counted kinds of calls, and whether later ones fail too */
static int fault; /* an errno, or KILL_ */
static volatile long *counters; /* whether the fault has happened, calls of its kinds, and calls of each kind */
static long jump_at, readings;
static double jump_seconds;

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

__attribute__((visibility("default"))) void chaos_arm(const char *path, long at, int what, long which, long stays,
                                                      volatile long *shared) {
    snprintf(folder, sizeof folder, "%s", path);
    fault_at = at, fault = what, kinds = which, lasting = stays, counters = shared;
}

__attribute__((visibility("default"))) void chaos_jump(long at, double seconds, volatile long *shared) {
    jump_at = at, jump_seconds = seconds, readings = 0, counters = shared;
}

static int below(const char *path) {
    size_t length = strlen(folder);
    return length && strncmp(path, folder, length) == 0;
}

static int concerns_path(int directory, const char *path) {
    char link[64], found[PATH_MAX];
    if (!folder[0] || !path) return 0;
    if (path[0] == '/') return below(path);
    if (directory == AT_FDCWD) return getcwd(found, sizeof found) && below(found);
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t size = readlink(link, found, sizeof found - 1);
    if (size < 0) return 0;
    found[size] = 0;
    return below(found);
}

static int concerns_file(int file) { return concerns_path(file, "."); }

/* Count a call; return 0 where it is to be made, 1 where it fails (errno is set), 2 where the process dies after it. */
static int count(int kind) {
    if (!counters) return 0;
    counters[2 + __builtin_ctz(kind)]++;
    if (!(kinds & kind)) return 0;
    long call = ++counters[1];
    if (!fault || !fault_at || call < fault_at || (call > fault_at && !lasting)) return 0;
    counters[0] = 1;
    if (fault == KILL_BEFORE) kill(getpid(), SIGKILL);
    if (fault == KILL_AFTER) return 2;
    errno = fault;
    return 1;
}

static long die_after(int outcome, long result) {
    if (outcome == 2) kill(getpid(), SIGKILL);
    return result;
}

#define GUARD(kind, concerned, call) \
    int outcome = (concerned) ? count(kind) : 0; \
    return outcome == 1 ? -1 : die_after(outcome, call)

static int opening_kind(int flags) { return flags & (O_WRONLY | O_RDWR | O_CREAT) ? CREATE : READ; }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        GUARD(opening_kind(flags), concerns_path(AT_FDCWD, path), real(path, flags, mode)); \
    }
#define OPENAT(name) \
    int name(int directory, const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        GUARD(opening_kind(flags), concerns_path(directory, path), real(directory, path, flags, mode)); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int file, const void *data, size_t size) {
    REAL(write);
    int outcome = concerns_file(file) ? count(WRITE) : 0;
    if (outcome == 1 && size > 1 && counters[1] == fault_at && lasting) { /* the disk has room for half of it */
        ssize_t written = real(file, data, size / 2);
        return written;
    }
    if (outcome == 2) real(file, data, (size + 1) / 2); /* half of it reaches the disk */
    return outcome == 1 ? -1 : outcome == 2 ? die_after(2, 0) : real(file, data, size);
}

ssize_t read(int file, void *data, size_t size) {
    REAL(read);
    GUARD(READ, concerns_file(file), real(file, data, size));
}

int fsync(int file) {
    REAL(fsync);
    GUARD(SYNC, concerns_file(file), real(file));
}

int ftruncate(int file, off_t size) {
    REAL(ftruncate);
    GUARD(WRITE, concerns_file(file), real(file, size));
}

int ftruncate64(int file, off64_t size) {
    REAL(ftruncate64);
    GUARD(WRITE, concerns_file(file), real(file, size));
}

int rename(const char *from, const char *to) {
    REAL(rename);
    GUARD(RENAME, concerns_path(AT_FDCWD, from), real(from, to));
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    GUARD(CREATE, concerns_path(AT_FDCWD, path), real(path, mode));
}

int unlink(const char *path) {
    REAL(unlink);
    GUARD(REMOVE, concerns_path(AT_FDCWD, path), real(path));
}

int rmdir(const char *path) {
    REAL(rmdir);
    GUARD(REMOVE, concerns_path(AT_FDCWD, path), real(path));
}

int unlinkat(int directory, const char *path, int flags) {
    REAL(unlinkat);
    GUARD(REMOVE, concerns_path(directory, path), real(directory, path, flags));
}

/* The clock of the day jumps either way. The monotonic one only forwards, as after a machine has slept. */
static double shift(int monotonic) {
    if (!jump_at || ++readings < jump_at) return 0;
    counters[0] = 1;
    return monotonic && jump_seconds < 0 ? 0 : jump_seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_MONOTONIC) now->tv_sec += (time_t)shift(clock == CLOCK_MONOTONIC);
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    REAL(gettimeofday);
    int result = real(now, zone);
    now->tv_sec += (time_t)shift(0);
    return result;
}

time_t time(time_t *place) {
    REAL(time);
    time_t now = real(NULL) + (time_t)shift(0);
    if (place) *place = now;
    return now;
}
