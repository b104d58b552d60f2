/* A consumer's session in a queue, and giving back all messages that a client holds there. */
#include "queue/session.h"

#include "base/atomics.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "base/status.h"
#include "memory/handles.h"
#include "memory/heap.h"
#include "memory/segment.h"
#include "queue/failure.h"
#include "queue/lease.h"
#include "queue/rebuild.h"
#include "queue/settings.h"
#include "queue/slots.h"
#include "queue/sort.h"
#include "shmq.h"

#include <string.h>

int session_open(shmq_broker *b, shmq_map *map, uint32_t max_in_flight, uint32_t *session)
{
	shmq_queue_desc *q = map->q;
	uint32_t n = sessions_of(map), more = n ? 2 * n : SHMQ_SESSIONS_FIRST, i;
	shmq_session_desc *s;

	for (i = 0; i < n; i++)
		if (!ld(&map->sessions[i].client)) /* SYNC(session-client) */
			break;
	if (i == n) {
		int r = n == SHMQ_SESSIONS ? fail(SHMQ_TABLE_FULL,
		                                  "the channel has %u consumers already; close some, or "
		                                  "let processes share them",
		                                  n)
		        : n < ld(&q->sessions_committed)
		                ? queue_corrupt(map)
		                : segment_commit(map->base,
		                                 (uint64_t)((uint8_t *)map->sessions - map->base),
		                                 more * sizeof(*s));

		if (r)
			return r;
		st(&q->sessions_committed, more < SHMQ_SESSIONS ? more : SHMQ_SESSIONS);
	}
	s = &map->sessions[i];
	memset((char *)s + sizeof(s->client), 0, sizeof(*s) - sizeof(s->client));
	s->generation = b->client_generation;
	s->max_in_flight = max_in_flight;
	s->since = realtime_ns();
	st_release(&s->client, b->client + 1); /* SYNC(session-client) */
	*session = i;
	return 0;
}

/* Remove a client's pins on this queue from its log and from the slots' counts. */
static void unpin_all(shmq_broker *b, shmq_map *map, uint32_t client)
{
	shmq_client_desc *c = &b->clients[client];

	for (uint32_t p = 0; p < SHMQ_PINS && p < ld(&c->pins_high); p++) {
		uint64_t pin = ld(&c->pins[p]);
		uint32_t slot = pin & 0xffffff;
		shmq_slot_desc *s = &map->slots[slot];

		if (pin != pin_of(map->serial, slot) || slot >= slots_of(map))
			continue;
		if (s->pins && !--s->pins && SHMQ_STATE_OF(ld(&s->word)) == SHMQ_PINNED) {
			in_use_remove(map, slot);
			slot_release(map, slot);
		}
		st(&c->pins[p], 0);
	}
}

/* Count a death for every message that the dead client held, noted in the requeue ring after `tail`,
 * and make them suspects, before the first of them is given back: a repair that is repeated still
 * knows by the counts that they were in company. A death in company convicts nobody. */
static void suspects_mark(shmq_map *map, uint32_t tail, uint32_t found)
{
	uint32_t most = settings_of(map)->max_attempts, mask = ring_mask_of(map);

	if (!most)
		most = MOST_FAILURES;
	else if (found > 1)
		most--;
	for (uint32_t i = 0; i < found; i++) {
		shmq_slot_desc *s = &map->slots[slot_in(map, &map->requeue[(tail + i) & mask])];

		failure_count(s, most);
		if (settings_of(map)->max_attempts)
			s->flags |= SHMQ_SLOT_SUSPECT;
		SHMQ_KILLPOINT("return.marked");
	}
}

uint32_t queue_return(shmq_broker *b, shmq_map *map, uint32_t client, uint32_t session)
{
	shmq_queue_desc *q = map->q;
	uint32_t n = slots_of(map), mask = ring_mask_of(map), tail = ld(&q->requeue_tail);
	uint32_t found = 0, sessions = sessions_of(map);
	bool died;

	/* Collect them in the order of delivery in the requeue ring after its tail, which is scratch
	 * space. */
	for (uint32_t i = 0; i < n; i++) {
		shmq_slot_desc *s = &map->slots[i];
		uint64_t word = ld(&s->word);

		if (SHMQ_OWNER_OF(word) != client)
			continue;
		if (SHMQ_STATE_OF(word) == SHMQ_IN_FLIGHT &&
		    (session == SHMQ_NONE || s->session == session))
			map->requeue[(tail + found++) & mask] = i;
		if (SHMQ_STATE_OF(word) == SHMQ_LOANED && session == SHMQ_NONE)
			slot_release(map, i);
	}
	sort_slots(map, map->requeue, tail, found, by_delivery, &map->deferred);
	/* A client that gives back its own messages lives. */
	died = session == SHMQ_NONE && !(b->attached && client == b->client) &&
	       has_policy(map, SHMQ_POLICY_FAILURES);
	if (died)
		suspects_mark(map, tail, found);
	for (uint32_t i = 0; i < found; i++) {
		uint32_t slot = slot_in(map, &map->requeue[(tail + i) & mask]);
		shmq_session_desc *its = session_of(map, &map->slots[slot]);

		if (its)
			session_leave(its);
		if (died && found > 1) {
			/* Not even one that has failed more often than a limit that was lowered since. (Only of
			 * such a one a repair that is repeated may not know this. It then is convicted, as it
			 * would be by any other failure.) */
			slot_acquit(b, map, slot, 0, BY_POLICY);
		} else if (died) {
			slot_take_back(b, map, slot, 0, BY_POLICY);
		} else {
			slot_requeue(map, slot, 0);
			heap_remove(&map->in_flight, slot);
		}
		SHMQ_KILLPOINT("return.slot");
	}
	for (uint32_t i = 0; i < sessions; i++)
		if (ld(&map->sessions[i].client) == client + 1 && (session == SHMQ_NONE || i == session))
			st_release(&map->sessions[i].client, 0); /* SYNC(session-client) */
	if (session == SHMQ_NONE) {
		unpin_all(b, map, client);
		lease_orphan(b, map, client);
	}
	bump(&q->returned, found);
	return found;
}
