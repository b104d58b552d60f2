/*
 * Waiting and waking. Each waiting thread has a doorbell (an unnamed process-shared semaphore in
 * the waiter table). A queue has one bitmap of the waiters for messages and one of those for room.
 *
 *   waiter: set the bit, fence, look again, sleep        waker: store, fence, read the bitmap,
 *                                                               clear a bit, post its doorbell
 *
 * Wake-ups are hints. A waiter looks again after 1 s at the latest; a surplus post makes it look
 * once too often.
 *
 * A waiter for many queues (lanes.c) keeps its bits in the bitmaps of all queues in which it found
 * nothing, also while it is awake, so that a sleep costs it nothing for each queue. A waker tells
 * it which queue it was. While it is awake it may not come for long, so the waker wakes another one
 * too. docs/model/many.cpp has the rules.
 *
 * death of a waker between clearing a bit and posting: the reaper posts every doorbell of the
 * queues that the dead client had used.
 * death of a waiter: the reaper clears its bits and initialises its doorbell again, because a
 * semaphore with a killed waiter stays slower.
 */
#include "sync/doorbell.h"

#include "base/atomics.h"
#include "base/bounds.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "base/libc.h"
#include "base/status.h"
#include "memory/handles.h"
#include "shmq.h"
#include "shmq_supervisor.h"

#include <errno.h>

static uint64_t bell_owner(const shmq_broker *b)
{
	return ((uint64_t)b->client_generation << 32) | (b->client + 1);
}

int bell_get(shmq_broker *b, uint32_t *bell)
{
	int r = SHMQ_TABLE_FULL;

	pthread_mutex_lock(&b->mutex);
	if (b->idle_count) {
		*bell = b->idle[--b->idle_count];
		r = 0;
	}
	pthread_mutex_unlock(&b->mutex);
	for (uint32_t i = 0; r && i < SHMQ_WAITERS; i++) {
		uint64_t nobody = 0;
		uint32_t high;

		if (ld(&b->waiters[i].owner) || /* SYNC(waiter-owner) */
		    !atomic_compare_exchange_strong(&b->waiters[i].owner, &nobody, bell_owner(b)))
			continue;
		high = ld(&b->d->waiters_high);
		while (high < i + 1 && !atomic_compare_exchange_weak(&b->d->waiters_high, &high, i + 1))
			;
		*bell = i;
		r = 0;
	}
	return r ? fail(r, "%d consumers and waits have a doorbell already; close some consumers",
	                SHMQ_WAITERS)
	         : 0;
}

void bell_drain(shmq_broker *b, uint32_t bell)
{
	/* A count above the number of waiters is garbage. A ring that is left over only causes one more
	 * look. */
	for (int n = 0; n < SHMQ_WAITERS && !sem_trywait(&b->waiters[bell].bell); n++)
		;
}

void bell_put(shmq_broker *b, uint32_t bell)
{
	if (!TRUST_CHECK(bell < SHMQ_WAITERS))
		return;
	bell_drain(b, bell);
	pthread_mutex_lock(&b->mutex);
	if (TRUST_CHECK(b->idle_count < SHMQ_WAITERS))
		b->idle[b->idle_count++] = bell;
	pthread_mutex_unlock(&b->mutex);
}

/* How long to spin: about as long as a sleep and a wake-up on another core take. */
#define SPIN_NS INT64_C(50000)
/* Sleeps until spinning is tried again after it failed: 64 at first, doubled by each failure. */
#define TRY_AFTER 64
#define TRY_AFTER_MOST 8192
/* Successful spins until a sleep is tried again. */
#define SLEEP_EVERY 1024

/*
 * The results of this thread's last waits decide whether it spins on its doorbell before it sleeps.
 * Between a question and its answer spinning saves two wake-ups. In a stream it is far better to
 * sleep while messages accumulate than to share the publisher's cache lines at every message; so
 * now and then the thread sleeps and counts the messages that accumulated. If the other side needs
 * this very core, spinning never succeeds.
 */
static _Thread_local uint32_t sleeps_to_go, try_after, spins;

static void spin_later(void)
{
	try_after = !try_after ? TRY_AFTER : try_after < TRY_AFTER_MOST ? 2 * try_after : try_after;
	sleeps_to_go = try_after;
}

void bell_gathered(uint32_t messages)
{
	if (messages > 3)
		sleeps_to_go = TRY_AFTER;
	else if (sleeps_to_go)
		sleeps_to_go--;
}

static bool bell_spin(sem_t *sem, int64_t start)
{
	do {
		for (int i = 0; i < 16; i++) {
			if (!sem_trywait(sem))
				return true;
			cpu_relax();
		}
	} while (now_ns() - start < SPIN_NS);
	return false;
}

int bell_wait(shmq_broker *b, uint32_t bell, int64_t deadline, int64_t slice, bool *slept)
{
	int64_t now = now_ns();

	*slept = false;
	if (deadline > now && !sleeps_to_go && ++spins % SLEEP_EVERY) {
		if (bell_spin(&b->waiters[bell].bell, now)) {
			try_after = 0;
			return 0;
		}
		spin_later();
		now = now_ns();
	}
	*slept = deadline > now;
	return bell_sleep(b, bell, deadline, slice);
}

int bell_sleep(shmq_broker *b, uint32_t bell, int64_t deadline, int64_t slice)
{
	sem_t *sem = &b->waiters[bell].bell;
	int64_t now = now_ns(), until = later(now, slice);

	if (deadline <= now)
		return sem_trywait(sem) ? SHMQ_TIMEOUT : 0;
	if (!sem_wait_until(sem, deadline < until ? deadline : until))
		return 0;
	if (errno == EINTR)
		return SHMQ_INTERRUPTED;
	return deadline < until ? SHMQ_TIMEOUT : 0;
}

int bell_none(int64_t deadline, int64_t pause)
{
	struct timespec t = timespec_of(pause);

	if (clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL))
		return SHMQ_INTERRUPTED;
	return now_ns() < deadline ? 0 : SHMQ_TIMEOUT;
}

void bell_ring(shmq_broker *b, uint32_t bell)
{
	if (TRUST_CHECK(bell < SHMQ_WAITERS))
		sem_post(&b->waiters[bell].bell);
}

/* Only waiters for many queues are asked for theirs, so `w` is a queue's `takers`. In a damaged
 * segment it may be another set of the same header, and the number is a wrong one. */
static uint32_t queue_of(const shmq_waitset_desc *w)
{
	const shmq_queue_desc *q = (const void *)((const uint8_t *)w -
	                                          offsetof(shmq_queue_desc, takers));

	return once(q->index);
}

/* The doorbell that this thread answers itself, and the queues for which it was picked. */
static _Thread_local struct {
	const shmq_broker *b; /* NULL: none */
	uint32_t bell, count;
	uint32_t queues[SHMQ_CAUGHT];
} caught;

void bell_catch(const shmq_broker *b, uint32_t bell)
{
	caught.b = b;
	caught.bell = bell;
	caught.count = 0;
}

uint32_t bell_caught(uint32_t *queues)
{
	uint32_t count = caught.count;

	caught.b = NULL;
	caught.count = 0;
	for (uint32_t i = 0; i < count; i++)
		queues[i] = caught.queues[i];
	return count;
}

static bool bell_is_caught(const shmq_broker *b, uint32_t bell, const shmq_waitset_desc *w)
{
	if (caught.b != b || caught.bell != bell || caught.count == SHMQ_CAUGHT)
		return false;
	caught.queues[caught.count++] = queue_of(w);
	return true;
}

/* Returns true if the waiter was asleep: it was, or will be, woken by this ring. */
static bool turn_take(shmq_waiter_desc *waiter)
{
	uint32_t asleep = SHMQ_TURN_ASLEEP, limited = SHMQ_TURN_LIMITED;

	if (atomic_compare_exchange_strong(&waiter->turn, &asleep, SHMQ_TURN_AWAKE)) {
		sem_post(&waiter->bell);
		return true;
	}
	if (atomic_compare_exchange_strong(&waiter->turn, &limited, SHMQ_TURN_AWAKE))
		sem_post(&waiter->bell);
	return false;
}

/* Tell the waiter whose bit was cleared. Returns false if another one is to be woken as well. */
static bool bell_tell(shmq_broker *b, uint32_t bell, const shmq_waitset_desc *w)
{
	shmq_waiter_desc *waiter = &b->waiters[bell];
	uint32_t hint;

	if (bell_is_caught(b, bell, w))
		return true;
	if (ld(&waiter->turn) == SHMQ_TURN_PLAIN) {
		sem_post(&waiter->bell);
		return true;
	}
	hint = queue_of(w) % SHMQ_HINTS;
	atomic_fetch_or(&waiter->hints[hint / 64], UINT64_C(1) << hint % 64); /* SYNC(hint) */
	SHMQ_KILLPOINT("wake.hint");
	return turn_take(waiter);
}

void bell_alarm(shmq_broker *b, uint32_t bell)
{
	shmq_waiter_desc *waiter = &b->waiters[bell];

	if (ld(&waiter->turn) != SHMQ_TURN_PLAIN)
		for (uint32_t i = 0; i < SHMQ_HINTS / 64; i++)
			atomic_store(&waiter->hints[i], UINT64_MAX); /* SYNC(hint) */
	sem_post(&waiter->bell);
}

void bell_names(shmq_broker *b, uint32_t bell)
{
	if (ld(&b->waiters[bell].names))
		sem_post(&b->waiters[bell].bell);
}

void bell_plain(shmq_waiter_desc *waiter)
{
	st(&waiter->turn, SHMQ_TURN_PLAIN);
	st(&waiter->names, 0);
	for (uint32_t i = 0; i < SHMQ_HINTS / 64; i++)
		st(&waiter->hints[i], 0);
}

void wait_announce(shmq_waitset_desc *w, uint32_t bell)
{
	atomic_fetch_or(&w->words[bell / 64], UINT64_C(1) << bell % 64);
	atomic_fetch_or(&w->summary, UINT64_C(1) << bell / 64);
	fence_full(); /* SYNC(wake) */
}

static void word_emptied(shmq_waitset_desc *w, uint32_t word)
{
	atomic_fetch_and(&w->summary, ~(UINT64_C(1) << word));
	fence_full();            /* SYNC(wake) */
	if (ld(&w->words[word])) /* another thread came meanwhile */
		atomic_fetch_or(&w->summary, UINT64_C(1) << word);
}

void wait_withdraw(shmq_waitset_desc *w, uint32_t bell)
{
	uint64_t bit = UINT64_C(1) << bell % 64;

	if (atomic_fetch_and(&w->words[bell / 64], ~bit) == bit)
		word_emptied(w, bell / 64);
}

/* Pick one waiter at or after `from`, cyclically, and clear its bit; SHMQ_NONE if there is none. */
static uint32_t wait_pick(shmq_waitset_desc *w, uint32_t from)
{
	uint64_t summary = ld(&w->summary);

	for (uint32_t step = 0; step <= SHMQ_WAITERS / 64; step++) {
		uint32_t word = (from / 64 + step) % (SHMQ_WAITERS / 64);
		uint64_t mask = step ? ~UINT64_C(0) : ~UINT64_C(0) << from % 64, bits, bit;

		if (!(summary >> word & 1))
			continue;
		while ((bits = ld(&w->words[word]) & mask)) {
			bit = bits & -bits;
			if (atomic_fetch_and(&w->words[word], ~bit) & bit) {
				if (!ld(&w->words[word]))
					word_emptied(w, word);
				return word * 64 + (uint32_t)__builtin_ctzll(bit);
			}
		}
	}
	return SHMQ_NONE;
}

void wait_wake(shmq_broker *b, shmq_waitset_desc *w, uint32_t n)
{
	fence_full(); /* SYNC(wake) */
	while (n && ld(&w->summary)) {
		uint32_t bell = wait_pick(w, ld(&w->rotor) % SHMQ_WAITERS);

		if (bell == SHMQ_NONE)
			break;
		st(&w->rotor, bell + 1);
		SHMQ_KILLPOINT("wake.post");
		if (bell_tell(b, bell, w))
			n--;
	}
}

void supervisor_ring(shmq_broker *b, uint32_t why)
{
	uint32_t bell = ld(&b->d->supervisor_waiter);

	if (bell && (atomic_fetch_or(&b->d->requested, why) & why) != why)
		bell_ring(b, bell - 1);
}

void spiller_note(shmq_broker *b, uint32_t index)
{
	_Atomic uint64_t *word = &b->d->spiller_pending[index / 64];
	uint64_t bit = UINT64_C(1) << index % 64;

	/* Call this after the store that the supervisor is to see: it takes the bit before it looks. */
	fence_full(); /* SYNC(spiller-pending) */
	if (!(ld(word) & bit))
		atomic_fetch_or(word, bit);
}

void spiller_ring(shmq_broker *b, uint32_t index)
{
	spiller_note(b, index);
	supervisor_ring(b, SHMQ_RING_SPILLER);
}

void shmq_spiller_request(shmq_broker *b, uint32_t queue)
{
	if (queue < SHMQ_QUEUES)
		spiller_ring(b, queue);
}

void scanner_ring(shmq_broker *b, int64_t deadline, int64_t due)
{
	fence_full(); /* SYNC(scan-deadline) */
	if (deadline < ld(&b->d->scan_deadline) || due < ld(&b->d->scan_due))
		supervisor_ring(b, SHMQ_RING_DEADLINE);
}

void shmq_scan_at(shmq_broker *b, int64_t deadline, int64_t due)
{
	st(&b->d->scan_deadline, deadline);
	st(&b->d->scan_due, due);
	fence_full(); /* SYNC(scan-deadline) */
}

uint32_t shmq_spiller_pending(shmq_broker *b, uint32_t *queues, uint32_t n)
{
	uint32_t count = 0;

	for (uint32_t i = 0; i < SHMQ_QUEUES / 64 && count + 64 <= n; i++) {
		uint64_t bits = ld(&b->d->spiller_pending[i]);

		if (bits)
			bits = atomic_exchange(&b->d->spiller_pending[i], 0);
		for (; bits; bits &= bits - 1)
			queues[count++] = i * 64 + (uint32_t)__builtin_ctzll(bits);
	}
	fence_full(); /* SYNC(spiller-pending) */
	return count;
}
