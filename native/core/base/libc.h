/*
 * Functions that not every C library has, and the words inside of its mutexes. Waiting for one
 * against CLOCK_MONOTONIC is glibc 2.30 and musl 1.2.6. An extension that is compiled for older ones
 * uses it where the library at hand has it, and else waits against CLOCK_REALTIME in slices, so that
 * a step of that clock delays one slice and expires nothing.
 *
 * The kernel prescribes the word that names the holder of a robust mutex, so the two libraries differ
 * in where it is, not in what it says. They also keep the kind in different places, and the fact that
 * a mutex was given up (ENOTRECOVERABLE).
 */
#ifndef SHMQ_LIBC_H
#define SHMQ_LIBC_H

#include <pthread.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/types.h>

#ifndef MADV_POPULATE_WRITE /* musl 1.2.5; these are the kernel's numbers */
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

/* The offsets at which a mutex has the id of the thread that holds it, and its kind. */
#ifdef __GLIBC__
#define SHMQ_LOCK_HOLDER offsetof(pthread_mutex_t, __data.__lock)
#define SHMQ_LOCK_KIND offsetof(pthread_mutex_t, __data.__kind)
#else /* musl calls these two _m_lock and _m_type */
#define SHMQ_LOCK_HOLDER offsetof(pthread_mutex_t, __u.__vi[1])
#define SHMQ_LOCK_KIND offsetof(pthread_mutex_t, __u.__i[0])
_Static_assert(sizeof(pthread_mutex_t) == 40 && sizeof(sem_t) == 32, "this is no musl of 64 bits");
#endif
_Static_assert(SHMQ_LOCK_HOLDER % 4 == 0 && SHMQ_LOCK_KIND % 4 == 0,
               "a word of a mutex is not aligned");

static inline uint32_t *mutex_holder(pthread_mutex_t *mutex)
{
	return (uint32_t *)(void *)((uint8_t *)mutex + SHMQ_LOCK_HOLDER);
}

static inline uint32_t *mutex_kind(pthread_mutex_t *mutex)
{
	return (uint32_t *)(void *)((uint8_t *)mutex + SHMQ_LOCK_KIND);
}

/* Take back that a mutex was given up. Returns the thread id in the word of the holder that has to
 * be replaced too, if it is there. */
uint32_t mutex_take_back(pthread_mutex_t *mutex);
/* Lock a mutex, waiting up to `until` (CLOCK_MONOTONIC ns). Returns as pthread_mutex_clocklock. */
int mutex_lock_until(pthread_mutex_t *mutex, int64_t until);
/* The same where the library lacks that function. */
int mutex_lock_by_realtime(pthread_mutex_t *mutex, int64_t until);
/* Take a semaphore, waiting up to `until`, whatever was written over it. Returns 0, or -1 with
 * errno, as sem_clockwait. */
int sem_wait_until(sem_t *sem, int64_t until);
int sem_wait_by_realtime(sem_t *sem, int64_t until);
/* Make a condition whose timed waits go by CLOCK_MONOTONIC. */
void cond_init(pthread_cond_t *cond);
pid_t thread_id(void);
/* Returns true if this process has the thread. */
bool thread_lives(pid_t thread);
/* Which C library this is, and its version. Its mutexes and semaphores are in the segments. */
const char *libc_name(void);

#endif
