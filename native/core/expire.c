/* Messages whose time-out or due time has come, and leases whose time is over. The supervisor's. */
#include "atomics.h"
#include "handles.h"
#include "heap.h"
#include "killpoint.h"
#include "lease.h"
#include "locking.h"
#include "mapping.h"
#include "sane.h"
#include "segment.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "slots.h"

int shmq_expire(shmq_broker *b, uint32_t queue, int64_t now, int64_t realtime, uint32_t limit,
                int64_t until, uint32_t *expired, uint32_t *due)
{
	shmq_map *map;
	shmq_queue_desc *q;
	uint64_t after;
	uint32_t given_back = 0;
	int r = map_get(b, queue, &map);

	if (r)
		return r;
	touch(b, queue);
	r = queue_lock(b, map, until);
	if (r) {
		map_release(map);
		return r;
	}
	q = map->q;
	*expired = *due = 0;
	defer_drain(b, map);
	after = ld(&topic_of(b, map)->committed) + 1;
	while (*expired + *due < limit && ld(&q->inflight_len) && heap_first(&map->inflight) <= now) {
		uint32_t slot = once(map->inflight.slot[0]);
		shmq_slot_desc *s = &map->slots[slot];
		shmq_session_desc *session;

		if (!slot_is(map, slot, SHMQ_INFLIGHT) || !SANE(s->deadline == map->inflight.when[0])) {
			queue_broken(map);
			break;
		}
		session = session_of(map, s);
		if (session) {
			session_leave(session);
			session->timed_out++;
		}
		slot_back(map, slot, after);
		SHMQ_KILLPOINT("expire.back");
		heap_remove(&map->inflight, slot);
		bump(&q->timed_out, 1);
		++*expired;
	}
	while (*expired + *due < limit && ld(&q->deferred_len) &&
	       heap_first(&map->deferred) <= realtime) {
		uint32_t slot = once(map->deferred.slot[0]);

		if (!slot_is(map, slot, SHMQ_DEFERRED)) {
			queue_broken(map);
			break;
		}
		slot_back(map, slot, after);
		SHMQ_KILLPOINT("expire.due");
		heap_remove(&map->deferred, slot);
		++*due;
	}
	lease_expire(map, now, limit, &given_back);
	st(&b->next_deadline[queue], INT64_MAX);
	deadline_note(b, map);
	st(&b->next_due[queue], heap_first(&map->deferred));
	fence_full();
	defer_drain(b, map); /* a publisher between the drain and this store noted its due time too early */
	queue_unlock(map);
	if (*expired + *due + given_back)
		wake_takers(b, map, *expired + *due + given_back);
	wake_space(b, map);
	map_release(map);
	return 0;
}
