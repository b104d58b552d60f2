#include "lock.h"

#include "clock.h"
#include "shmq.h"

#include <errno.h>

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
	return SHMQ_CORRUPT; /* EINVAL, ENOTRECOVERABLE: not a mutex of ours any more */
}

int lock_take(shmq_lock_desc *lock, int64_t until)
{
	int r = pthread_mutex_trylock(&lock->mutex);

	if (r == EBUSY && until) {
		struct timespec t = timespec_of(until);

		r = pthread_mutex_clocklock(&lock->mutex, CLOCK_MONOTONIC, &t);
	}
	return lock_status(r);
}

void lock_consistent(shmq_lock_desc *lock)
{
	pthread_mutex_consistent(&lock->mutex);
}

void lock_drop(shmq_lock_desc *lock)
{
	pthread_mutex_unlock(&lock->mutex);
}
