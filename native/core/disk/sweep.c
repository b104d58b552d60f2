/*
 * Expired messages that nobody takes: the supervisor looks through a queue twice a second at most, and
 * drops those in the middle of its rings, too.
 *
 * The look takes no lock: it only finds out whether there are any, and when the next one expires. The
 * rings are cleared in pieces under both locks, so that nobody waits long. death: rings are derived,
 * and the next locker rebuilds them.
 */
#include "base/atomics.h"
#include "base/bounds.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "memory/handles.h"
#include "memory/heap.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "queue/locking.h"
#include "queue/rebuild.h"
#include "queue/settings.h"
#include "queue/slots.h"
#include "shmq.h"
#include "shmq_supervisor.h"

#define PIECE 4096u /* ring entries that are looked at under the locks */

enum { AT_BEGIN, IN_REQUEUED, IN_READY, IN_DEFERRED, AT_END, OVER = SHMQ_SWEPT };

/* Look at every slot. Returns whether one that waits has expired. */
static bool look(shmq_map *map, int64_t now, int64_t *earliest)
{
	uint32_t n = slots_of(map);
	bool found = false;

	for (uint32_t i = 0; i < n; i++) {
		const shmq_slot_desc *s = &map->slots[i];
		unsigned state = SHMQ_STATE_OF(ld(&s->word));
		int64_t when;

		if (state == SHMQ_FREE || !may_expire(map, s))
			continue;
		when = expiry_of(map, s);
		if (when < *earliest)
			*earliest = when;
		found |= when <= now && (state == SHMQ_READY || state == SHMQ_REQUEUED ||
		                         (state == SHMQ_DEFERRED && !(s->flags & SHMQ_SLOT_CONVICTED)));
	}
	return found;
}

/* Drop the expired entries [from, end) of a ring, and close the gaps: entries before them move up.
 * Both locks are held. */
static void ring_clear(shmq_broker *b, shmq_map *map, unsigned state, uint32_t from, uint32_t end,
                       shmq_sweep *s)
{
	shmq_queue_desc *q = map->q;
	bool ready = state == SHMQ_READY;
	uint32_t *ring = ready ? map->ready : map->requeue, mask = ring_mask_of(map), to = end;
	_Atomic uint32_t *head = ready ? &q->ready_head : &q->requeue_head;

	for (uint32_t at = end; at != from; at--) {
		uint32_t slot = ring[(at - 1) & mask];

		if (!slot_is(map, slot, state)) {
			queue_broken(map);
			return;
		}
		if (expiry_of(map, &map->slots[slot]) > s->now) {
			ring[--to & mask] = slot;
			continue;
		}
		if (ready)
			ready_bytes_left(map, body_bytes(&map->slots[slot]));
		cast_out(b, map, slot, SHMQ_DEAD_EXPIRED, !ready);
		SHMQ_KILLPOINT("sweep.slot");
		s->expired++;
	}
	if (to == from)
		return;
	for (uint32_t at = from, first = ld(head); at != first; at--)
		ring[--to & mask] = ring[(at - 1) & mask];
	SHMQ_KILLPOINT("sweep.ring");
	st_release(head, to); /* SYNC(ready-head) SYNC(requeue-head) */
	if (!ready)
		requeue_head_group_find(map);
}

/* The next piece of a ring. Returns true if it was the last one. */
static bool ring_step(shmq_broker *b, shmq_map *map, unsigned state, shmq_sweep *s)
{
	shmq_queue_desc *q = map->q;
	bool ready = state == SHMQ_READY;
	uint32_t head = ready ? ld(&q->ready_head) : ld(&q->requeue_head);
	uint32_t tail = ready ? ld(&q->ready_tail) : ld(&q->requeue_tail), from = s->next, end;

	if (!TRUST_CHECK(tail - head <= slots_of(map))) {
		queue_broken(map);
		return true;
	}
	if (!s->within || tail - from > tail - head)
		from = head; /* consumers have overtaken the sweep */
	end = tail - from > PIECE ? from + PIECE : tail;
	ring_clear(b, map, state, from, end, s);
	s->next = end;
	s->within = end != tail;
	return end == tail || ld(&q->dirty);
}

/* Drop the deferred messages that have expired: those that were delivered before. */
static void deferred_clear(shmq_broker *b, shmq_map *map, shmq_sweep *s)
{
	for (uint32_t i = ld(&map->q->deferred_len); i-- > 0 && !ld(&map->q->dirty);) {
		uint32_t slot = slot_in(map, &map->deferred.slot[i]);
		shmq_slot_desc *it = &map->slots[slot];

		if (!slot_is(map, slot, SHMQ_DEFERRED)) {
			queue_broken(map);
			return;
		}
		if (it->flags & SHMQ_SLOT_CONVICTED || expiry_of(map, it) > s->now)
			continue;
		heap_remove(&map->deferred, slot);
		cast_out(b, map, slot, SHMQ_DEAD_EXPIRED, true);
		SHMQ_KILLPOINT("sweep.deferred");
		s->expired++;
		if (i > ld(&map->q->deferred_len))
			i = ld(&map->q->deferred_len);
	}
}

/* Both locks are held. */
static void sweep_step(shmq_broker *b, shmq_map *map, shmq_sweep *s)
{
	if (s->step == IN_DEFERRED) {
		defer_drain(b, map);
		deferred_clear(b, map, s);
		s->step = AT_END;
	} else if (ring_step(b, map, s->step == IN_REQUEUED ? SHMQ_REQUEUED : SHMQ_READY, s)) {
		s->within = false;
		s->step++;
	}
}

/* Note when the next sweep is due. D is held. */
static void sweep_end(shmq_broker *b, shmq_map *map, const shmq_sweep *s)
{
	int64_t next = s->earliest;

	if (has_policy(map, SHMQ_POLICY_EXPIRY)) {
		int64_t newest = later(s->now, message_ttl_of(map));

		next = newest < next ? newest : next;
	}
	if (next != INT64_MAX)
		expiry_note(b, map, next);
	st(&b->next_due[map->index], due_first(map));
	fence_full(); /* SYNC(due-time) */
	defer_drain(b, map);
	due_note(b, map->index, due_first(map));
}

int shmq_sweep_expired(shmq_broker *b, uint32_t queue, int64_t until, shmq_sweep *s)
{
	uint32_t was = s->step;
	shmq_map *map;
	int r = both_enter(b, queue, until, &map);

	if (r)
		return r;
	if (s->step == AT_BEGIN)
		st(&map->q->next_expiry, INT64_MAX); /* from now on publishers note what expires */
	else if (s->step != AT_END)
		sweep_step(b, map, s);
	else
		sweep_end(b, map, s);
	both_unlock(b, map);
	if (s->step == AT_BEGIN) {
		s->now = realtime_ns();
		s->earliest = INT64_MAX;
		s->step = look(map, s->now, &s->earliest) ? IN_REQUEUED : AT_END;
	} else if (s->step == AT_END && was == AT_END) {
		s->step = OVER;
	}
	wake_space(b, map);
	map_release(map);
	return 0;
}
