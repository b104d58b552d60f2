/*
 * The reaper finds clients whose `life` lock was left by a death, and gives back all that they
 * held. The client's entry is freed last.
 *
 * death inside: the entry is still LIVE, so the next reaper does all of it again.
 */
#include "base/atomics.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "queue/locking.h"
#include "queue/session.h"
#include "queue/slots.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "sync/doorbell.h"
#include "sync/lock.h"

#include <poll.h>

/* While no other client is attached, the pause between two scans is this many times as long. */
#define ALONE 3

/* Returns how many locks were tried. */
static uint32_t reap_scan(shmq_broker *b, shmq_dead *out, uint32_t n, uint32_t *found)
{
	uint32_t clients = clients_of(b), tried = 0;

	*found = 0;
	for (uint32_t i = 0; i < clients && *found < n; i++) {
		shmq_client_desc *c = &b->clients[i];
		uint32_t generation = ld_acquire(&c->generation); /* SYNC(client-generation) */
		int r;

		if (ld_acquire(&c->state) != SHMQ_CLIENT_LIVE || ld(&c->orphan) || /* SYNC(client-state) */
		    (b->attached && i == b->client))
			continue;
		tried++;
		r = lock_take(&c->life, 0);
		if (r && r != SHMQ_LOCK_DIED)
			continue;
		if (r)
			lock_consistent(&c->life);
		lock_drop(&c->life);
		out[*found] = (shmq_dead){.client = i,
		                          .generation = generation,
		                          .pid = c->pid,
		                          .start_time = c->start_time,
		                          .program = c->program};
		/* It may have detached just now, and the entry may be another client's. */
		fence_full(); /* SYNC(client-generation) */
		if (ld(&c->state) == SHMQ_CLIENT_LIVE && ld(&c->generation) == generation)
			++*found;
	}
	return tried;
}

int shmq_reap_scan(shmq_broker *b, shmq_dead *out, uint32_t n, uint32_t *found)
{
	(void)reap_scan(b, out, n, found);
	return 0;
}

int shmq_reap_wait(shmq_broker *b, int fd, int64_t every, int64_t until, shmq_dead *out, uint32_t n,
                   uint32_t *found)
{
	struct pollfd ended = {.fd = fd, .events = POLLIN};

	for (;;) {
		/* While no other client is attached, scan three times less often: a client that attaches
		 * and dies in between cannot have held anything for long. */
		int64_t pause = reap_scan(b, out, n, found) ? every : ALONE * every;
		int64_t left = until - now_ns();
		struct timespec t;

		if (*found || left <= 0)
			return 0;
		t = timespec_of(left < pause ? left : pause);
		if (ppoll(&ended, 1, &t, NULL))
			return 0;
	}
}

void shmq_reap_spare(shmq_broker *b, uint32_t client, uint32_t generation)
{
	if (client < SHMQ_CLIENTS && ld(&b->clients[client].generation) == generation)
		st(&b->clients[client].orphan, 1);
}

/* Give back everything that a client holds of one queue. */
static int reap_queue(shmq_broker *b, uint32_t queue, uint32_t client, int64_t until,
                      uint32_t *returned)
{
	shmq_topic_desc *t;
	shmq_map *map;
	int r = map_get(b, queue, &map);

	/* The index was given to another queue. A client that detaches and never mapped that one holds
	 * nothing of it. */
	if (r == SHMQ_NEED_MAP && b->attached && client == b->client)
		return 0;
	if (r)
		return r == SHMQ_GONE ? 0 : r;
	/* Take P first, only to repair it if this client died with it; release it at once, so that no
	 * traffic waits. */
	t = topic_of(b, map);
	r = topic_lock(b, t, until);
	if (!r) {
		topic_unlock(t);
		r = queue_lock(b, map, until);
	}
	if (!r) {
		*returned += queue_return(b, map, client, SHMQ_NONE);
		for (uint32_t i = 0; i < waiters_of(b); i++)
			if ((uint32_t)ld(&b->waiters[i].owner) == client + 1) {
				wait_withdraw(&map->q->takers, i);
				wait_withdraw(&map->q->space, i);
			}
		queue_unlock(map);
		wake_takers(b, map, WAKE_ALL);
		wait_wake(b, &map->q->space, WAKE_ALL);
		spiller_ring(b, queue); /* it may have died before it rang */
	}
	map_release(map);
	/* Nothing can be given back in a queue that cannot be repaired; in the others it must be. */
	return r == SHMQ_GONE || r == SHMQ_CORRUPT ? 0 : r;
}

int shmq_reap(shmq_broker *b, uint32_t client, uint32_t generation, int64_t until,
              uint32_t *returned)
{
	shmq_client_desc *c = &b->clients[client];

	*returned = 0;
	if (client >= clients_of(b) || ld(&c->generation) != generation ||
	    ld(&c->state) != SHMQ_CLIENT_LIVE)
		return SHMQ_GONE;
	for (uint32_t word = 0; word < SHMQ_QUEUES / 64; word++) {
		uint64_t bits;

		while ((bits = ld(&c->touched[word]))) {
			uint32_t queue = word * 64 + (uint32_t)__builtin_ctzll(bits);
			int r = reap_queue(b, queue, client, until, returned);

			if (r)
				return r;
			SHMQ_KILLPOINT("reap.queue");
			atomic_fetch_and(&c->touched[word], ~(bits & -bits));
		}
	}
	for (uint32_t i = 0; i < SHMQ_PINS; i++)
		st(&c->pins[i], 0); /* of queues that are gone */
	st(&c->pins_high, 0);
	for (uint32_t i = 0; i < SHMQ_REQUESTS; i++) {
		uint32_t state = ld(&b->requests[i].state);

		if (b->requests[i].client != client)
			continue;
		if (state == SHMQ_REQUEST_POSTED)
			atomic_compare_exchange_strong(&b->requests[i].state, &state, SHMQ_REQUEST_ABANDONED);
		if (state == SHMQ_REQUEST_DONE)
			st_release(&b->requests[i].state, SHMQ_REQUEST_FREE); /* SYNC(request-state) */
	}
	/* The client may have died between clearing a waiter's bit and posting, or before it rang for a
	 * change of its own: every waiter looks again. */
	supervisor_ring(b, SHMQ_RING_ALL);
	for (uint32_t i = 0; i < waiters_of(b); i++)
		if (ld(&b->waiters[i].owner))
			bell_alarm(b, i);
	for (uint32_t i = 0; i < waiters_of(b); i++)
		if ((uint32_t)ld(&b->waiters[i].owner) == client + 1) {
			sem_destroy(&b->waiters[i].bell);
			sem_init(&b->waiters[i].bell, 1, 0);
			bell_plain(&b->waiters[i]);
			st_release(&b->waiters[i].owner, 0); /* SYNC(waiter-owner) */
		}
	SHMQ_KILLPOINT("reap.entry");
	bump(&b->d->reaped, 1);
	st_release(&c->state, SHMQ_CLIENT_FREE); /* SYNC(client-state) */
	return 0;
}
