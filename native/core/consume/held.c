/*
 * Messages in flight that an operator takes from their consumers: the steps are those of a consumer's
 * own finish and release (slots.c, failure.c), under the deliver lock (D), so a death inside leaves
 * what it leaves there.
 */
#include "base/atomics.h"
#include "base/bounds.h"
#include "base/clock.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "queue/failure.h"
#include "queue/latency.h"
#include "queue/locking.h"
#include "queue/slots.h"
#include "shmq.h"
#include "sync/doorbell.h"

/* Returns true if the slot is the message. */
static bool is_it(shmq_broker *b, const shmq_slot_desc *s, const shmq_held *m)
{
	uint64_t word = ld(&s->word);
	uint32_t owner = SHMQ_OWNER_OF(word);

	return SHMQ_STATE_OF(word) == SHMQ_IN_FLIGHT && once(s->id) == m->id &&
	       (!m->pid || (owner < clients_of(b) && once(b->clients[owner].pid) == m->pid));
}

/* Find the message's slot without a lock. A message that stays in flight stays in its slot, so one that
 * is not found was not in flight at some time during the call. */
static int held_find(shmq_broker *b, const shmq_held *m, uint32_t *slot)
{
	shmq_map *map;
	int r = usable_status(b);
	uint32_t n;

	if (!r)
		r = map_get_serial(b, m->queue, m->serial, &map);
	if (r)
		return r;
	n = slots_of(map);
	for (*slot = 0; *slot < n && !is_it(b, &map->slots[*slot], m); ++*slot)
		;
	map_release(map);
	return *slot < n ? 0 : SHMQ_NOT_IN_FLIGHT;
}

/* Find the message and take D. Leave with held_leave. */
static int held_enter(shmq_broker *b, const shmq_held *m, int64_t until, shmq_map **map,
                      uint32_t *slot)
{
	int r = held_find(b, m, slot);

	if (!r)
		r = queue_enter_serial(b, m->queue, m->serial, until, map);
	if (r || is_it(b, &(*map)->slots[*slot], m))
		return r;
	queue_unlock(*map);
	map_release(*map);
	return SHMQ_NOT_IN_FLIGHT;
}

/* Its consumer may wait for its limit to allow more, and others for the message: all look. */
static void held_leave(shmq_broker *b, shmq_map *map)
{
	queue_unlock(map);
	wake_space(b, map);
	wake_takers(b, map, WAKE_ALL);
	map_release(map);
}

int shmq_held_finish(shmq_broker *b, const shmq_held *m, int64_t until)
{
	int64_t realtime = realtime_ns();
	shmq_map *map;
	uint32_t slot;
	int r = held_enter(b, m, until, &map, &slot);

	if (r)
		return r;
	slot_finish(map, slot, realtime, now_ns());
	latency_turn(map->latency, realtime);
	bump(&map->q->finished, 1);
	held_leave(b, map);
	return 0;
}

int shmq_held_requeue(shmq_broker *b, const shmq_held *m, int64_t delay_ns, int64_t until)
{
	shmq_map *map;
	uint32_t slot;
	int r = held_enter(b, m, until, &map, &slot);

	if (r)
		return r;
	slot_give_back(b, map, slot, delay_within(b, delay_ns));
	bump(&map->q->requeued, 1);
	held_leave(b, map);
	return 0;
}
