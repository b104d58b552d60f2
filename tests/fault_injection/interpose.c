/*
 * The system calls of a disk, any of which can be made to fail: preloaded into a Python that drives
 * the supervisor's parts (rig.py). Only calls on files below one directory count; they are numbered
 * from 1.
 *
 *   faults_watch(directory)              count from now on
 *   faults_arm(first, last, error)       calls first to last fail with this
 * errno; error 0: a write among them takes half of its bytes faults_count() how many there were
 * since faults_watch
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static char watched[PATH_MAX];
static unsigned count, first, last;
static int failing;

void faults_watch(const char *directory)
{
	snprintf(watched, sizeof(watched), "%s", directory);
	count = first = last = 0;
}

void faults_arm(unsigned from, unsigned to, int error)
{
	first = from;
	last = to;
	failing = error;
}

unsigned faults_count(void)
{
	return count;
}

static int is_watched(const char *path)
{
	return watched[0] && !strncmp(path, watched, strlen(watched));
}

static int fd_is_watched(int fd)
{
	char link[64], path[PATH_MAX];
	ssize_t n;

	if (!watched[0])
		return 0;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	n = readlink(link, path, sizeof(path) - 1);
	if (n < 0)
		return 0;
	path[n] = 0;
	return is_watched(path);
}

/* 0: go on; 1: fails; 2: half of it. */
static int fails(int here, int is_write)
{
	if (!here)
		return 0;
	count++;
	if (count < first || count > last)
		return 0;
	if (!failing)
		return is_write ? 2 : 0;
	errno = failing;
	return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define WRITES(name, parameters, arguments, half)                                                  \
	ssize_t name parameters                                                                        \
	{                                                                                              \
		switch (fails(fd_is_watched(fd), 1)) {                                                     \
		case 1:                                                                                    \
			return -1;                                                                             \
		case 2:                                                                                    \
			return REAL(name) half;                                                                \
		}                                                                                          \
		return REAL(name) arguments;                                                               \
	}
WRITES(write, (int fd, const void *data, size_t n), (fd, data, n), (fd, data, (n + 1) / 2))
WRITES(pwrite, (int fd, const void *data, size_t n, off_t at), (fd, data, n, at),
       (fd, data, (n + 1) / 2, at))
WRITES(pwrite64, (int fd, const void *data, size_t n, off64_t at), (fd, data, n, at),
       (fd, data, (n + 1) / 2, at))

#define ON_FD(name, parameters, arguments)                                                         \
	int name parameters                                                                            \
	{                                                                                              \
		return fails(fd_is_watched(fd), 0) ? -1 : REAL(name) arguments;                            \
	}
ON_FD(fsync, (int fd), (fd))
ON_FD(fdatasync, (int fd), (fd))
ON_FD(ftruncate, (int fd, off_t n), (fd, n))
ON_FD(ftruncate64, (int fd, off64_t n), (fd, n))
ON_FD(fchmod, (int fd, mode_t mode), (fd, mode))

#define ON_PATH(name, parameters, arguments)                                                       \
	int name parameters                                                                            \
	{                                                                                              \
		return fails(is_watched(path), 0) ? -1 : REAL(name) arguments;                             \
	}
ON_PATH(truncate, (const char *path, off_t n), (path, n))
ON_PATH(truncate64, (const char *path, off64_t n), (path, n))
ON_PATH(unlink, (const char *path), (path))
ON_PATH(rename, (const char *path, const char *to), (path, to))
ON_PATH(link, (const char *path, const char *to), (path, to))

/* Opening to read too: a file that cannot be opened is a fault as any. */
#define OPENS(name)                                                                                \
	int name(const char *path, int flags, ...)                                                     \
	{                                                                                              \
		va_list list;                                                                              \
		mode_t mode;                                                                               \
                                                                                                   \
		va_start(list, flags);                                                                     \
		mode = flags & O_CREAT ? va_arg(list, mode_t) : 0;                                         \
		va_end(list);                                                                              \
		return fails(is_watched(path), 0) ? -1 : REAL(name)(path, flags, mode);                    \
	}
OPENS(open)
OPENS(open64)
