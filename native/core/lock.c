#include "lock.h"

#include "clock.h"
#include "bounds.h"
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
 * A process that maps a segment can scribble in a mutex too. Three things are known of our mutexes.
 * The kind never changes. A mutex is never given up (ENOTRECOVERABLE), because every locker that
 * learns of a death makes it consistent. The holder is a live thread, because the kernel marks the
 * mutexes of a dead one (and thread ids are reused only after all others were). So an overwritten
 * mutex that nobody holds is repaired completely. One that is overwritten while it is held is
 * repaired only as far as the holder's unlock works with it.
 */
/* The kernel's FUTEX_TID_MASK, FUTEX_WAITERS and FUTEX_OWNER_DIED. */
#define HOLDER UINT32_C(0x3fffffff)
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
	if (!TRUST_CHECK(__atomic_load_n(&lock->mutex.__data.__kind, __ATOMIC_RELAXED) == kind_of_ours))
		__atomic_store_n(&lock->mutex.__data.__kind, kind_of_ours, __ATOMIC_RELAXED);
}

/* Mark a mutex that no live thread holds as the kernel does after a death, and undo
 * ENOTRECOVERABLE. Returns true if it can be tried again. */
static bool holder_mend(shmq_lock_desc *lock, int r)
{
	uint32_t *word = (uint32_t *)&lock->mutex.__data.__lock;
	uint32_t held = __atomic_load_n(word, __ATOMIC_ACQUIRE); /* SYNC(lock-holder) */
	int given_up = GIVEN_UP;

	if (r == ENOTRECOVERABLE) {
		__atomic_compare_exchange_n(&lock->mutex.__data.__owner, &given_up, 0, false,
		                            __ATOMIC_ACQ_REL, __ATOMIC_RELAXED); /* SYNC(lock-holder) */
		if ((held & HOLDER) != (uint32_t)gettid()) /* pthread_mutex_trylock leaves it held */
			return true;
	} else if (!held || held & DIED ||
	           (held & HOLDER && (!kill((pid_t)(held & HOLDER), 0) || errno != ESRCH))) {
		return false;
	}
	/* SYNC(lock-holder) */
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
