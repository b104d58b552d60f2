/* The scanner: messages that time out or fall due, and leases whose time is over. */
#include "base/atomics.h"
#include "base/bounds.h"
#include "base/killpoint.h"
#include "memory/handles.h"
#include "memory/heap.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "queue/failure.h"
#include "queue/lease.h"
#include "queue/locking.h"
#include "queue/settings.h"
#include "queue/slots.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "sync/doorbell.h"

/* Move messages whose time-out is before `now` to the requeue ring, where they wait for all READY
 * messages up to `after`. Returns their number. */
static uint32_t expire_in_flight(shmq_broker *b, shmq_map *map, int64_t now, uint64_t after,
                                 uint32_t limit)
{
	shmq_queue_desc *q = map->q;
	bool failures = has_policy(map, SHMQ_POLICY_FAILURES);
	uint32_t count = 0;

	for (; count < limit && ld(&q->in_flight_len) && heap_first(&map->in_flight) <= now; count++) {
		uint32_t slot = once(map->in_flight.slot[0]);
		shmq_slot_desc *s = &map->slots[slot];
		shmq_session_desc *session;

		if (!slot_is(map, slot, SHMQ_IN_FLIGHT) ||
		    !TRUST_CHECK(s->deadline == map->in_flight.when[0])) {
			queue_broken(map);
			break;
		}
		session = session_of(map, s);
		if (session) {
			session_leave(session);
			session->timed_out++;
		}
		if (failures) {
			slot_fail(b, map, slot, after, BY_POLICY);
		} else {
			slot_requeue(map, slot, after);
			SHMQ_KILLPOINT("expire.back");
			heap_remove(&map->in_flight, slot);
		}
		bump(&q->timed_out, 1);
	}
	return count;
}

static void convicted_to_front(shmq_map *map, uint32_t slot)
{
	map->slots[slot].deadline = SHMQ_DUE_CONVICTED;
	heap_change(&map->deferred, slot, SHMQ_DUE_CONVICTED);
}

/* The same for deferred messages that are due. A convicted one stays on top of the heap, and holds up
 * the others until the supervisor has moved it or put it off (shmq_dead_waiting). */
static uint32_t expire_deferred(shmq_broker *b, shmq_map *map, int64_t realtime, uint64_t after,
                                uint32_t limit)
{
	shmq_queue_desc *q = map->q;
	uint32_t count = 0;

	for (; count < limit && ld(&q->deferred_len) && heap_first(&map->deferred) <= realtime;
	     count++) {
		uint32_t slot = once(map->deferred.slot[0]);

		if (!slot_is(map, slot, SHMQ_DEFERRED)) {
			queue_broken(map);
			break;
		}
		if (map->slots[slot].flags & SHMQ_SLOT_CONVICTED) {
			convicted_to_front(map, slot);
			break;
		}
		slot_falls_due(b, map, &map->slots[slot]);
		/* Suspects go first, as they do when they come back without a delay. */
		slot_requeue(map, slot, map->slots[slot].flags & SHMQ_SLOT_SUSPECT ? 0 : after);
		SHMQ_KILLPOINT("expire.due");
		heap_remove(&map->deferred, slot);
	}
	return count;
}

int shmq_expire(shmq_broker *b, uint32_t queue, const shmq_expiry *step, int64_t until,
                uint32_t *expired, uint32_t *due)
{
	shmq_map *map;
	uint64_t after;
	uint32_t given_back = 0;
	int r = queue_enter(b, queue, until, &map);

	if (r)
		return r;
	defer_drain(b, map);
	after = ld(&topic_of(b, map)->committed) + 1;
	*expired = expire_in_flight(b, map, step->now, after, step->limit);
	*due = expire_deferred(b, map, step->realtime, after, step->limit - *expired);
	lease_expire(map, step->now, step->limit, &given_back);
	st(&b->next_deadline[queue], INT64_MAX);
	deadline_note(b, map);
	st(&b->next_due[queue], due_first(map));
	fence_full(); /* SYNC(due-time) */
	/* A publisher that came between the drain above and the store noted its due time too early. */
	defer_drain(b, map);
	due_note(b, queue, due_first(map));
	queue_unlock(map);
	if (*expired + *due + given_back)
		wake_takers(b, map,
		            has_policy(map, SHMQ_POLICY_FAILURES) ? WAKE_ALL
		                                                  : *expired + *due + given_back);
	wake_space(b, map);
	map_release(map);
	return 0;
}
