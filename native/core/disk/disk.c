/*
 * The disk positions of a queue, and emptying it.
 *
 *   empty   under the publish and the deliver lock: the states become FREE, then disk_read =
 *           disk_write, then a rebuild.
 */
#include "base/atomics.h"
#include "base/killpoint.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "queue/lease.h"
#include "queue/locking.h"
#include "queue/rebuild.h"
#include "queue/slots.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "sync/doorbell.h"

int shmq_disk_set(shmq_broker *b, uint32_t queue, uint64_t from, uint64_t read_position,
                  uint64_t depth, int64_t until)
{
	shmq_map *map;
	bool emptied;
	int r = queue_enter(b, queue, until, &map);

	if (r)
		return r;
	if (ld(&map->q->disk_read) != from || lease_has_run(map)) {
		r = SHMQ_GONE;
	} else {
		st(&map->q->disk_depth, depth);
		/* damage at the very end of the write file moves both positions past it */
		if (read_position > ld(&map->q->disk_write))
			st_release(&map->q->disk_write, read_position); /* SYNC(disk-write) */
		st_release(&map->q->disk_read, read_position);      /* SYNC(disk-read) */
	}
	emptied = disk_is_empty(map->q);
	queue_unlock(map);
	if (emptied)
		wake_takers(b, map, WAKE_ALL);
	map_release(map);
	return r;
}

int shmq_disk_adopt(shmq_broker *b, uint32_t queue, uint64_t read_position, uint64_t write_position,
                    uint64_t depth, uint64_t chunk, int64_t until)
{
	shmq_map *map;
	shmq_queue_desc *q;
	int r = both_enter(b, queue, until, &map);

	if (r)
		return r;
	q = map->q;
	for (uint32_t i = 0; i < slots_of(map); i++)
		if (slot_is(map, i, SHMQ_REQUEUED))
			map->slots[i].pos = SHMQ_NO_POSITION;
	st(&q->deferred_gone, 0);
	st(&q->deferred_read, 0);
	st_release(&q->deferred_write, chunk); /* SYNC(deferred-write) */
	st(&q->disk_depth, depth);
	st_release(&q->disk_write, write_position); /* SYNC(disk-write) */
	st_release(&q->disk_read, read_position);   /* SYNC(disk-read) */
	disk_is_empty(q);
	both_unlock(b, map);
	wake_takers(b, map, WAKE_ALL);
	map_release(map);
	return 0;
}

int shmq_queue_empty(shmq_broker *b, uint32_t queue, uint64_t serial, int64_t until,
                     uint64_t *dropped)
{
	shmq_map *map;
	shmq_queue_desc *q;
	uint64_t count;
	int r = usable_status(b);

	if (!r)
		r = map_get_serial(b, queue, serial, &map);
	if (r)
		return r;
	client_note_queue(b, queue);
	r = both_lock(b, map, until);
	if (r)
		goto out;
	q = map->q;
	count = ld(&q->disk_depth) + ld(&q->deferred_depth);
	st(&q->dirty, 1);
	SHMQ_KILLPOINT("empty.dirty");
	for (uint32_t i = 0; i < slots_of(map); i++) {
		shmq_slot_desc *s = &map->slots[i];
		uint64_t word = ld(&s->word);
		unsigned state = SHMQ_STATE_OF(word);

		if (state != SHMQ_READY && state != SHMQ_REQUEUED && state != SHMQ_IN_FLIGHT &&
		    state != SHMQ_DEFERRED && state != SHMQ_SPILLING && state != SHMQ_RESTORED)
			continue;
		/* SYNC(slot-state) */
		st_release(&s->word, word_next(word, SHMQ_PINNED)); /* FREE below, unless pinned */
		SHMQ_KILLPOINT("empty.slot");
		count++;
	}
	st_release(&q->disk_read, ld(&q->disk_write)); /* SYNC(disk-read) */
	st(&q->disk_depth, 0);
	st_release(&q->deferred_gone, ld(&q->deferred_write)); /* SYNC(deferred-gone) */
	st(&q->deferred_depth, 0);
	SHMQ_KILLPOINT("empty.disk");
	queue_rebuild(b, map, false); /* wakes everybody */
	disk_is_empty(q);
	both_unlock(b, map);
	*dropped = count;
	spiller_ring(b, queue); /* files to drop */
out:
	map_release(map);
	return r;
}
