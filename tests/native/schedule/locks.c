/*
 * Locks and doorbells as the core sees them. The first word of a lock is the holder's number + 1,
 * the second says that it died; the first word of a doorbell counts.
 */
#include "scheduler.h"

#include <errno.h>

/* ---- locks: the first word is the holder's number + 1, the second says that it died ---- */

struct lock_words {
	uint32_t holder, died;
};

static const void *locks[4096];

static uint32_t lock_count;

static struct lock_words *words_of(shmq_lock_desc *lock)
{
	return (struct lock_words *)(void *)lock;
}

int lock_init(shmq_lock_desc *lock)
{
	*words_of(lock) = (struct lock_words){0, 0};
	return 0;
}

static void note_lock(const void *lock)
{
	for (uint32_t i = 0; i < lock_count; i++)
		if (locks[i] == lock)
			return;
	locks[lock_count++] = lock;
}

int lock_take(shmq_lock_desc *lock, int64_t until)
{
	struct lock_words *w = words_of(lock);

	schedule_drain();
	schedule_access(lock, true);
	while (w->holder && schedule_fault != FAULT_NO_LOCK) {
		if (!until)
			return SHMQ_AGAIN;
		if (!running || w->holder == me + 1)
			schedule_fail("actor %u waits for ever for a lock of actor %u", me, w->holder - 1);
		wait_for(WAITS_FOR_LOCK, lock);
	}
	if (w->died == 2)
		return SHMQ_CORRUPT;
	w->holder = me + 1;
	note_lock(lock);
	return w->died ? SHMQ_LOCK_DIED : 0;
}

void lock_consistent(shmq_lock_desc *lock)
{
	schedule_drain();
	schedule_access(lock, true);
	words_of(lock)->died = 0;
}

bool lock_drop(shmq_lock_desc *lock)
{
	struct lock_words *w = words_of(lock);

	schedule_drain();
	schedule_access(lock, true);
	if (w->died)
		w->died = 2; /* ENOTRECOVERABLE from now on */
	w->holder = 0;
	for (uint32_t i = 0; i < ACTORS; i++)
		if (actors[i].is == WAITS_FOR_LOCK && actors[i].waits_for == lock)
			actors[i].is = GOES_ON;
	return true;
}

void locks_die(uint32_t actor)
{
	for (uint32_t i = 0; i < lock_count; i++) {
		struct lock_words *w = (struct lock_words *)(uintptr_t)locks[i];

		if (w->holder != actor + 1)
			continue;
		w->holder = 0;
		w->died = schedule_fault == FAULT_NO_OWNER_DIED ? 0 : 1;
		for (uint32_t k = 0; k < ACTORS; k++)
			if (actors[k].is == WAITS_FOR_LOCK && actors[k].waits_for == w)
				actors[k].is = GOES_ON;
	}
}

static uint32_t posts;

int schedule_sem_init(sem_t *sem, unsigned value)
{
	memset(sem, 0, sizeof(*sem));
	*(uint32_t *)(void *)sem = value;
	return 0;
}

int schedule_sem_post(sem_t *sem)
{
	schedule_drain();
	schedule_access(sem, true);
	if (schedule_fault == FAULT_LOST_POST && running && posts++ % 2 == 0)
		return 0;
	++*(uint32_t *)(void *)sem;
	for (uint32_t i = 0; i < ACTORS; i++)
		if (actors[i].is == WAITS_FOR_RING && actors[i].waits_for == sem)
			actors[i].is = GOES_ON;
	return 0;
}

int schedule_sem_trywait(sem_t *sem)
{
	uint32_t *value = (uint32_t *)(void *)sem;

	schedule_drain();
	if (!*value) /* the same as not having looked */
		return -1;
	schedule_access(sem, true);
	if (!*value)
		return -1;
	--*value;
	return 0;
}

/* Never ends by its time as long as anybody can go on. */
int schedule_sem_wait(sem_t *sem)
{
	uint32_t *value = (uint32_t *)(void *)sem;

	schedule_drain();
	schedule_access(sem, true);
	while (!*value) {
		if (!running)
			schedule_fail("nobody but an actor may wait");
		wait_for(WAITS_FOR_RING, sem);
		if (actors[me].timed_out) {
			actors[me].timed_out = false;
			ticks += 1000000; /* a second */
			errno = ETIMEDOUT;
			return -1;
		}
	}
	--*value;
	return 0;
}

int schedule_pause(void)
{
	if (running)
		wait_for(PAUSES, NULL);
	return 0;
}

void locks_begin(void)
{
	posts = 0;
}

void locks_forget(void)
{
	lock_count = 0;
}
