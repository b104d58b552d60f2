#include "sync/lock.h"

#include "base/bounds.h"
#include "base/libc.h"
#include "base/process.h"
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

/*
 * A process that maps a segment can scribble in a mutex too. Three things are known of our mutexes.
 * The kind never changes. A mutex is never given up (ENOTRECOVERABLE), because every locker that
 * learns of a death makes it consistent. The holder is a live thread, because the kernel marks the
 * mutexes of a dead one (and thread ids are reused only after all others were), and its process maps
 * the segment. So an overwritten mutex that nobody holds is repaired completely, unless it names a
 * thread whose mappings may not be read. One that is overwritten while it is held is repaired only as
 * far as the holder's unlock works with it.
 */
/* The kernel's FUTEX_TID_MASK, FUTEX_WAITERS and FUTEX_OWNER_DIED. */
#define HOLDER UINT32_C(0x3fffffff)
#define WAITED UINT32_C(0x80000000)
#define DIED UINT32_C(0x40000000)

static uint32_t kind_of_ours;

__attribute__((constructor)) static void look_at_one(void)
{
	shmq_lock_desc lock;

	if (!lock_init(&lock))
		kind_of_ours = *mutex_kind(&lock.mutex);
}

static void kind_mend(shmq_lock_desc *lock)
{
	uint32_t *kind = mutex_kind(&lock->mutex);

	if (!TRUST_CHECK(__atomic_load_n(kind, __ATOMIC_RELAXED) == kind_of_ours))
		__atomic_store_n(kind, kind_of_ours, __ATOMIC_RELAXED);
}

/* Returns true if the thread that a mutex names can hold it. */
static bool can_hold(pid_t thread, const shmq_lock_desc *lock)
{
	return (!kill(thread, 0) || errno != ESRCH) && process_may_map(thread, lock);
}

/* Mark a mutex that no live thread holds as the kernel does after a death, and undo
 * ENOTRECOVERABLE. Returns true if it can be tried again. */
static bool holder_mend(shmq_lock_desc *lock, int r)
{
	uint32_t *word = mutex_holder(&lock->mutex);
	uint32_t held = __atomic_load_n(word, __ATOMIC_ACQUIRE); /* SYNC(lock-holder) */

	if (r == ENOTRECOVERABLE) {
		if ((held & HOLDER) != mutex_take_back(&lock->mutex))
			return true;
	} else if (!held || (held & HOLDER ? can_hold((pid_t)(held & HOLDER), lock) : held & DIED)) {
		return false; /* in musl the one that repairs after a death has both in the word */
	}
	/* SYNC(lock-holder) */
	return __atomic_compare_exchange_n(word, &held, DIED | (held & WAITED), false, __ATOMIC_ACQ_REL,
	                                   __ATOMIC_RELAXED);
}

int lock_take(shmq_lock_desc *lock, int64_t until)
{
	int r;

	kind_mend(lock);
	r = pthread_mutex_trylock(&lock->mutex);
	if (r == EBUSY && until)
		r = mutex_lock_until(&lock->mutex, until);
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
