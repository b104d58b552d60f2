#include "lock.h"

#include "clock.h"
#include "sane.h"
#include "shmq.h"

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <unistd.h>

int lock_init(shmq_lock_desc *lock)
{
	pthread_mutexattr_t attr;
	int r;

	pthread_mutexattr_init(&attr);
	pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
	pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
	r = pthread_mutex_init(&lock->mutex, &attr);
	pthread_mutexattr_destroy(&attr);
	return r ? SHMQ_CORRUPT : 0;
}

static int lock_status(int r)
{
	switch (r) {
	case 0:
		return 0;
	case EOWNERDEAD:
		return SHMQ_LOCK_DIED;
	case EBUSY:
	case ETIMEDOUT:
		return SHMQ_AGAIN;
	}
	return SHMQ_CORRUPT; /* EINVAL, ENOTRECOVERABLE: the mutex was overwritten */
}

#ifdef __GLIBC__
/*
 * A process that maps a segment can scribble in a mutex too. The fields of ours are known: its kind
 * never changes; it is never given up (ENOTRECOVERABLE), for whoever is told of a death makes it
 * consistent; and it is held by a thread that is there, for of one that is not the kernel has
 * marked it. (A thread's number is not given again before all others were.) So an unheld one is
 * made good again, whatever is in it; one that is scribbled in while it is held, only as far as its
 * holder's unlocking survives it.
 */
#define HOLDER UINT32_C(0x3fffffff) /* the kernel's FUTEX_TID_MASK, ... */
#define WAITED UINT32_C(0x80000000)
#define DIED UINT32_C(0x40000000)
#define GIVEN_UP (INT32_MAX - 1) /* glibc's PTHREAD_MUTEX_NOTRECOVERABLE */

static int kind_of_ours;

__attribute__((constructor)) static void look_at_one(void)
{
	shmq_lock_desc lock;

	if (!lock_init(&lock))
		kind_of_ours = lock.mutex.__data.__kind;
}

static void kind_mend(shmq_lock_desc *lock)
{
	if (!SANE(__atomic_load_n(&lock->mutex.__data.__kind, __ATOMIC_RELAXED) == kind_of_ours))
		__atomic_store_n(&lock->mutex.__data.__kind, kind_of_ours, __ATOMIC_RELAXED);
}

/* Mark a mutex that nobody holds as the kernel would have done, and take back that it was given up.
 * Returns true if it can be tried again. */
static bool holder_mend(shmq_lock_desc *lock, int r)
{
	uint32_t *word = (uint32_t *)&lock->mutex.__data.__lock;
	uint32_t held = __atomic_load_n(word, __ATOMIC_ACQUIRE);
	int given_up = GIVEN_UP;

	if (r == ENOTRECOVERABLE) {
		__atomic_compare_exchange_n(&lock->mutex.__data.__owner, &given_up, 0, false,
		                            __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
		if ((held & HOLDER) != (uint32_t)gettid()) /* pthread_mutex_trylock leaves it held */
			return true;
	} else if (!held || held & DIED ||
	           (held & HOLDER && (!kill((pid_t)(held & HOLDER), 0) || errno != ESRCH))) {
		return false;
	}
	return __atomic_compare_exchange_n(word, &held, DIED | (held & WAITED), false, __ATOMIC_ACQ_REL,
	                                   __ATOMIC_RELAXED);
}
#else
static void kind_mend(shmq_lock_desc *lock)
{
	(void)lock;
}
static bool holder_mend(shmq_lock_desc *lock, int r)
{
	return (void)lock, (void)r, false;
}
#endif

int lock_take(shmq_lock_desc *lock, int64_t until)
{
	int r;

	kind_mend(lock);
	r = pthread_mutex_trylock(&lock->mutex);
	if (r == EBUSY && until) {
		struct timespec t = timespec_of(until);

		r = pthread_mutex_clocklock(&lock->mutex, CLOCK_MONOTONIC, &t);
	}
	if ((r == ENOTRECOVERABLE || (r && r != EOWNERDEAD && until)) && holder_mend(lock, r))
		r = pthread_mutex_trylock(&lock->mutex);
	return lock_status(r);
}

void lock_consistent(shmq_lock_desc *lock)
{
	pthread_mutex_consistent(&lock->mutex);
}

bool lock_drop(shmq_lock_desc *lock)
{
	return !pthread_mutex_unlock(&lock->mutex);
}
