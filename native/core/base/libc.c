#include "base/libc.h"

#include "base/bounds.h"
#include "base/clock.h"

#include <errno.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __GLIBC__
#include <gnu/libc-version.h>
#endif

#define SLICE_NS (100 * NS_PER_MS)

/* In parentheses, because the scheduler of the tests has macros of these names. */
extern int(pthread_mutex_clocklock)(pthread_mutex_t *, clockid_t, const struct timespec *)
		__attribute__((weak));
extern int(sem_clockwait)(sem_t *, clockid_t, const struct timespec *) __attribute__((weak));

/* The word of a semaphore that says, in both libraries, whether other processes share it. glibc ends
 * a process that waits for one in which it has another value. */
#define SEM_SHARED 2

static uint32_t shared_of_ours;
/* musl before 1.2.4 counts in another way, so that its semaphores are not those of later ones. */
static bool old_musl;

__attribute__((constructor)) static void look_at_one(void)
{
	union {
		sem_t sem;
		uint32_t words[sizeof(sem_t) / 4];
	} one;
	struct timespec past = {1, 0};

	(sem_init)(&one.sem, 1, 0);
	shared_of_ours = one.words[SEM_SHARED];
	(sem_timedwait)(&one.sem, &past);
	old_musl = one.words[0] == UINT32_MAX; /* -1: somebody waited */
	(sem_destroy)(&one.sem);
}

uint32_t mutex_take_back(pthread_mutex_t *mutex)
{
#ifdef __GLIBC__
	int given_up = INT32_MAX - 1; /* its PTHREAD_MUTEX_NOTRECOVERABLE */
	int *owner = &mutex->__data.__owner;

	/* SYNC(lock-holder) */
	__atomic_compare_exchange_n(owner, &given_up, 0, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
	return (uint32_t)thread_id(); /* pthread_mutex_trylock leaves it held */
#else
	(void)mutex;
	return UINT32_C(0x3fffffff); /* the id that no thread has says it */
#endif
}

void cond_init(pthread_cond_t *cond)
{
	pthread_condattr_t attr;

	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(cond, &attr);
	pthread_condattr_destroy(&attr);
}

#ifndef __GLIBC__
/*
 * The list of the robust mutexes that the calling thread holds. musl keeps it across a fork, although
 * the child holds none of them. The child's first lock would link itself to one of its parent's, in
 * shared memory, and the parent's unlock would then write through that link. glibc begins a new list.
 */
static struct {
	void *next, *offset, *pending; /* the kernel's struct robust_list_head */
} *held;

static void before_fork(void)
{
	size_t size;

	if (syscall(SYS_get_robust_list, 0, &held, &size))
		held = NULL;
}

static void in_child(void)
{
	if (held)
		held->next = held;
}

__attribute__((constructor)) static void watch_forks(void)
{
	pthread_atfork(before_fork, NULL, in_child);
}
#endif

/* The end of the next slice, CLOCK_REALTIME. */
static struct timespec slice_end(int64_t until)
{
	int64_t left = until - now_ns();

	return timespec_of(realtime_ns() + (left < 0 ? 0 : left < SLICE_NS ? left : SLICE_NS));
}

int mutex_lock_by_realtime(pthread_mutex_t *mutex, int64_t until)
{
	int r;

	do {
		struct timespec t = slice_end(until);

		r = pthread_mutex_timedlock(mutex, &t);
	} while (r == ETIMEDOUT && now_ns() < until);
	return r;
}

int mutex_lock_until(pthread_mutex_t *mutex, int64_t until)
{
	struct timespec t = timespec_of(until);

	if (!pthread_mutex_clocklock)
		return mutex_lock_by_realtime(mutex, until);
	return pthread_mutex_clocklock(mutex, CLOCK_MONOTONIC, &t);
}

/* Before a wait: make a semaphore that was overwritten one that can be waited for. */
static void sem_mend(sem_t *sem)
{
	uint32_t *words = (uint32_t *)(void *)sem, count;

	if (!TRUST_CHECK(__atomic_load_n(&words[SEM_SHARED], __ATOMIC_RELAXED) == shared_of_ours))
		__atomic_store_n(&words[SEM_SHARED], shared_of_ours, __ATOMIC_RELAXED);
	if (!old_musl)
		return;
	count = __atomic_load_n(words, __ATOMIC_RELAXED);
	if (!TRUST_CHECK((int32_t)count >=
	                 -1)) /* it would ask the kernel again and again, past any time */
		__atomic_compare_exchange_n(words, &count, 0, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

int sem_wait_by_realtime(sem_t *sem, int64_t until)
{
	int r;

	do {
		struct timespec t = slice_end(until);

		sem_mend(sem);
		r = sem_timedwait(sem, &t);
	} while (r && errno == ETIMEDOUT && now_ns() < until);
	return r;
}

int sem_wait_until(sem_t *sem, int64_t until)
{
	struct timespec t = timespec_of(until);

	if (!sem_clockwait)
		return sem_wait_by_realtime(sem, until);
	sem_mend(sem);
	return sem_clockwait(sem, CLOCK_MONOTONIC, &t);
}

pid_t thread_id(void)
{
	return (pid_t)syscall(SYS_gettid); /* glibc has a function since 2.30 */
}

bool thread_lives(pid_t thread)
{
	return !syscall(SYS_tgkill, getpid(), thread, 0);
}

const char *libc_name(void)
{
#ifdef __GLIBC__
	return gnu_get_libc_version();
#else
	return old_musl ? "musl before 1.2.4" : "musl";
#endif
}
