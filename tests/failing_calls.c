/* Counts the file calls below a folder, and lets one of them fail. Loaded before libc, by LD_PRELOAD,
   so it sees the calls of Python and of libraries in C++ alike. `failing_calls.py` shares `control`
   with it, by a file that both map. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define F_DUPFD 0
#define F_DUPFD_CLOEXEC 1030
#define HALF -1 /* a write that writes half, and says so */
#define DEAD -2 /* nothing after it changes a file, as after a kill; a write writes half first */
#define KILL -3 /* kill -9 of the process; a write writes half first */

struct control {
  long fail_at; /* 0: nothing fails */
  long mode;    /* an errno, or one of the above */
  long count;   /* calls so far */
  long fired, dead;
  char call[88]; /* what failed */
};

extern int raise(int);
extern int dirfd(void *);
static struct control *control;
static char below[512];
static size_t length;
static char is_below[1 << 16]; /* of each open file */

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

__attribute__((constructor)) static void begin(void) {
  const char *folder = getenv("FAILING_BELOW"), *file = getenv("FAILING_CONTROL");
  if (!folder || !file) return;
  strncpy(below, folder, sizeof below - 1);
  length = strlen(below);
  int (*open_)(const char *, int, ...) = real("open");
  int handle = open_(file, 2);
  void *map = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, handle, 0);
  if (handle >= 0 && map != MAP_FAILED) control = map;
}

static int known(int handle) { return handle >= 0 && handle < 1 << 16 && is_below[handle]; }
static int named(int folder, const char *path) {
  if (!control || !path) return 0;
  if (path[0] != '/') return known(folder);
  return !strncmp(path, below, length) && (path[length] == '/' || !path[length]);
}
static int note(int handle, int is) {
  if (handle >= 0 && handle < 1 << 16) is_below[handle] = is;
  return handle;
}

/* 0: the call is made. 1: it fails, with errno. 2: it writes half. */
static int fails(const char *name, const char *path, int writes) {
  if (control->dead) return errno = EIO, 1;
  if (!control->fail_at || (control->mode == HALF && !writes)) return 0;
  if (__sync_add_and_fetch(&control->count, 1) != control->fail_at) return 0;
  strncpy(control->call, name, sizeof control->call - 1);
  if (path) {
    size_t n = strlen(path), room = sizeof control->call - strlen(name) - 2;
    strcat(control->call, " ");
    strcat(control->call, path + (n > room ? n - room : 0));
  }
  control->fired = 1;
  if (control->mode > 0) return errno = control->mode, 1;
  if (control->mode == DEAD) control->dead = 1;
  if (writes) return 2;
  if (control->mode == KILL) raise(SIGKILL);
  return errno = EIO, 1;
}
static long after_half(long wrote) {
  if (control->mode == KILL) raise(SIGKILL);
  if (control->mode == DEAD) return errno = EIO, -1;
  return wrote;
}

/* By paths. */
#define OPEN(name, parameters, folder, arguments)                    \
  int name parameters {                                              \
    va_list rest;                                                    \
    va_start(rest, flags);                                           \
    int mode = va_arg(rest, int);                                    \
    va_end(rest);                                                    \
    int is = named(folder, path);                                    \
    if (is && fails(#name, path, 0)) return -1;                      \
    return note(((int(*) parameters)real(#name))arguments, is);      \
  }
OPEN(open, (const char *path, int flags, ...), -1, (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), -1, (path, flags, mode))
OPEN(openat, (int at, const char *path, int flags, ...), at, (at, path, flags, mode))
OPEN(openat64, (int at, const char *path, int flags, ...), at, (at, path, flags, mode))

#define BY_PATH(name, parameters, folder, path, arguments)           \
  int name parameters {                                              \
    if (named(folder, path) && fails(#name, path, 0)) return -1;     \
    return ((int(*) parameters)real(#name))arguments;                \
  }
BY_PATH(mkdir, (const char *p, unsigned m), -1, p, (p, m))
BY_PATH(mkdirat, (int at, const char *p, unsigned m), at, p, (at, p, m))
BY_PATH(rmdir, (const char *p), -1, p, (p))
BY_PATH(unlink, (const char *p), -1, p, (p))
BY_PATH(unlinkat, (int at, const char *p, int f), at, p, (at, p, f))
BY_PATH(rename, (const char *p, const char *q), -1, p, (p, q))
BY_PATH(renameat, (int at, const char *p, int to, const char *q), at, p, (at, p, to, q))
BY_PATH(renameat2, (int at, const char *p, int to, const char *q, unsigned f), at, p,
        (at, p, to, q, f))
BY_PATH(stat, (const char *p, void *s), -1, p, (p, s))
BY_PATH(stat64, (const char *p, void *s), -1, p, (p, s))
BY_PATH(lstat, (const char *p, void *s), -1, p, (p, s))
BY_PATH(lstat64, (const char *p, void *s), -1, p, (p, s))
BY_PATH(fstatat, (int at, const char *p, void *s, int f), at, p, (at, p, s, f))
BY_PATH(fstatat64, (int at, const char *p, void *s, int f), at, p, (at, p, s, f))
BY_PATH(__xstat, (int v, const char *p, void *s), -1, p, (v, p, s))
BY_PATH(__fxstatat, (int v, int at, const char *p, void *s, int f), at, p, (v, at, p, s, f))
BY_PATH(__lxstat, (int v, const char *p, void *s), -1, p, (v, p, s))

/* By open files. */
#define BY_FILE(type, name, parameters, arguments)                   \
  type name parameters {                                             \
    if (known(fd) && fails(#name, 0, 0)) return -1;                  \
    return ((type(*) parameters)real(#name))arguments;               \
  }
/* No power is cut here, and flushes would take nearly all of the time. */
#define FLUSH(name)                                                  \
  int name(int fd) {                                                 \
    if (known(fd)) return fails(#name, 0, 0) ? -1 : 0;               \
    return ((int (*)(int))real(#name))(fd);                          \
  }
FLUSH(fsync)
FLUSH(fdatasync)
BY_FILE(int, flock, (int fd, int f), (fd, f))
BY_FILE(int, ftruncate, (int fd, long n), (fd, n))
BY_FILE(int, ftruncate64, (int fd, long n), (fd, n))
BY_FILE(int, fstat, (int fd, void *s), (fd, s))
BY_FILE(int, fstat64, (int fd, void *s), (fd, s))
BY_FILE(int, __fxstat, (int v, int fd, void *s), (v, fd, s))
BY_FILE(long, read, (int fd, void *b, size_t n), (fd, b, n))
BY_FILE(long, pread, (int fd, void *b, size_t n, long o), (fd, b, n, o))
BY_FILE(long, pread64, (int fd, void *b, size_t n, long o), (fd, b, n, o))

#define WRITE(name, parameters, all, half)                           \
  long name parameters {                                             \
    long (*call) parameters = real(#name);                           \
    int how = known(fd) ? fails(#name, 0, n > 1) : 0;                \
    if (!how) return call all;                                       \
    return how == 1 ? -1 : after_half(call half);                    \
  }
WRITE(write, (int fd, const void *b, size_t n), (fd, b, n), (fd, b, n / 2))
WRITE(pwrite, (int fd, const void *b, size_t n, long o), (fd, b, n, o), (fd, b, n / 2, o))
WRITE(pwrite64, (int fd, const void *b, size_t n, long o), (fd, b, n, o), (fd, b, n / 2, o))
WRITE(writev, (int fd, const void *b, int n), (fd, b, n), (fd, b, n / 2))

/* An open file is closed whatever `close` says. */
int close(int fd) {
  int was = known(fd);
  note(fd, 0);
  int result = ((int (*)(int))real("close"))(fd);
  return was && fails("close", 0, 0) ? -1 : result;
}

/* `os.scandir` of an open directory opens a copy. */
#define COPY(name)                                                   \
  int name(int fd, int command, ...) {                               \
    va_list rest;                                                    \
    va_start(rest, command);                                         \
    long value = va_arg(rest, long);                                 \
    va_end(rest);                                                    \
    int result = ((int (*)(int, int, ...))real(#name))(fd, command, value); \
    int copies = command == F_DUPFD || command == F_DUPFD_CLOEXEC;   \
    return copies ? note(result, known(fd)) : result;                \
  }
COPY(fcntl)
COPY(fcntl64)

/* Directories. */
void *opendir(const char *path) {
  int is = named(-1, path);
  if (is && fails("opendir", path, 0)) return 0;
  void *opened = ((void *(*)(const char *))real("opendir"))(path);
  if (opened) note(dirfd(opened), is);
  return opened;
}
#define READ_DIRECTORY(name)                                         \
  void *name(void *opened) {                                         \
    if (known(dirfd(opened)) && fails(#name, 0, 0)) return 0;        \
    return ((void *(*)(void *))real(#name))(opened);                 \
  }
READ_DIRECTORY(readdir)
READ_DIRECTORY(readdir64)
int closedir(void *opened) {
  note(dirfd(opened), 0);
  return ((int (*)(void *))real("closedir"))(opened);
}
