#include "fanout.h"

#include "atomics.h"
#include "doorbell.h"
#include "handles.h"
#include "room.h"
#include "segment.h"
#include "shmq.h"
#include "slots.h"

/* The number of READY messages above which the spiller is rung: three quarters of the budget, so
 * that it comes early. With messages on disk every new message waits for those anyway. */
static uint32_t high_water(const shmq_broker *b, const shmq_map *map)
{
	if (!b->d->limits.mem_queue_size)
		return 0;
	return ready_budget(map) / 4 * (on_disk(map->q) ? 2 : 3);
}

bool fanout_overflows(shmq_broker *b, shmq_map *map, uint32_t n, bool deferred)
{
	shmq_queue_desc *q = map->q;
	uint32_t mark = high_water(b, map), ready = ready_count_cached(q, mark);
	bool over = ready > mark && ready - mark <= n; /* it was rung when the mark was passed */

	over |= ld(&q->arena_committed) == map->arena_max && q->arena.free_bytes < map->arena_max / 8;
	over |= deferred && defers_many(map);
	over &= !(q->flags & SHMQ_FLAG_EPHEMERAL);
	if (over)
		spiller_note(b, map->index);
	return over;
}
