/*
 * Locking the registry, a topic's publish lock (P) and a queue's deliver lock (D), and noticing
 * that a holder died.
 *
 *   a holder of P died   topic.dirty = 1, the lock is made consistent; then each queue of the topic
 *                        is rebuilt with its D held; dirty is cleared last. While it is set, every
 *                        later locker of P does this first.
 *   a holder of D died   queue.dirty = 1, the lock is made consistent, D is released; P and D are
 *                        taken and the queue is rebuilt: never under D alone, because a publisher
 *                        moves the other half meanwhile.
 *
 * A holder of P may also have died while it moved messages of another topic's queue into its own
 * (dead.c). It noted that queue in topic.moving; the next locker of P decides its MOVING slots.
 *
 * If a rebuild cannot finish (a queue is not mapped yet, a lock is held by a stopped process) the
 * locks stay usable and `dirty` stays set.
 */
#include "queue/locking.h"

#include "base/atomics.h"
#include "base/killpoint.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "queue/rebuild.h"
#include "queue/slots.h"
#include "queue/writer.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "sync/lock.h"

int registry_lock(shmq_broker *b, int64_t until)
{
	int r = lock_take(&b->d->registry, until);

	if (r != SHMQ_LOCK_DIED)
		return r;
	/* An entry becomes LIVE by one store, so the dead one left it free or whole. */
	lock_consistent(&b->d->registry);
	return 0;
}

void registry_unlock(shmq_broker *b)
{
	lock_drop(&b->d->registry);
}

static void deliver_died(shmq_map *map)
{
	st(&map->q->dirty, 1);
	SHMQ_KILLPOINT("recover.deliver_dirty");
	lock_consistent(&map->q->deliver);
}

/* Take the deliver lock (D), with a death noted but not repaired. */
static int deliver_take(shmq_map *map, int64_t until)
{
	int r = lock_take(&map->q->deliver, until);

	if (r == SHMQ_LOCK_DIED) {
		deliver_died(map);
		r = 0;
	}
	return r;
}

static bool queue_is_closed(const shmq_map *map)
{
	return ld(&map->q->segment.ready) != SHMQ_READY_STATE;
}

void queue_unlock(shmq_map *map)
{
	lock_drop(&map->q->deliver);
}

static int queue_repair(shmq_broker *b, shmq_map *map)
{
	int r = queue_rebuild(b, map, false);

	if (!r)
		atomic_fetch_add(&b->d->rebuilt, 1);
	return r;
}

int queue_lock_under(shmq_broker *b, shmq_map *map, int64_t until)
{
	int r = deliver_take(map, until);

	if (r)
		return r;
	if (queue_is_closed(map)) {
		queue_unlock(map);
		return SHMQ_GONE;
	}
	if (!ld(&map->q->dirty) && words_are_sane(map)) /* SYNC(dirty) */
		return 0;
	r = queue_repair(b, map);
	if (r)
		queue_unlock(map);
	return r;
}

int queue_lock_beside(shmq_map *map, int64_t until, bool *clean)
{
	int r = deliver_take(map, until);

	if (r)
		return r;
	if (queue_is_closed(map)) {
		queue_unlock(map);
		return SHMQ_GONE;
	}
	*clean = !ld(&map->q->dirty) && words_are_sane(map); /* SYNC(dirty) */
	return 0;
}

/* Decide the slots that were being moved from another queue into this topic, whose holder of P
 * died. The next locker of that queue makes its rings and heaps again. P is held. */
static int moves_decide(shmq_broker *b, shmq_topic_desc *t, int64_t until)
{
	uint32_t source = ld(&t->moving), mark = (uint32_t)(t - b->topics) + 1, n;
	uint64_t committed = ld(&t->committed); /* SYNC(commit) */
	shmq_map *map;
	int r = source && source <= queues_of(b) ? map_get(b, source - 1, &map) : SHMQ_GONE;

	if (!r) {
		r = deliver_take(map, until);
		if (!r) {
			st(&map->q->dirty, 1);
			SHMQ_KILLPOINT("recover.source_dirty");
			n = slots_of(map);
			for (uint32_t i = 0; i < n; i++)
				slot_move_decide(&map->slots[i], mark, committed);
			queue_unlock(map);
			due_note(b, map->index, SHMQ_DUE_CONVICTED); /* the scanner is the next locker */
		}
		map_release(map);
	}
	if (r && r != SHMQ_GONE)
		return r;
	st(&t->moving, 0);
	return 0;
}

/* Rebuild every queue of a topic whose holder of the publish lock (P) died. P is held. */
static int topic_recover(shmq_broker *b, shmq_topic_desc *t, int64_t until)
{
	uint32_t topic = (uint32_t)(t - b->topics), n = queues_of(b);
	int status = moves_decide(b, t, until);

	if (status)
		return status;
	for (uint32_t i = 0; i < n; i++) {
		shmq_map *map;
		int r;

		if (!entry_is(b, i, topic))
			continue;
		r = map_get(b, i, &map);
		if (r == SHMQ_GONE)
			continue;
		if (r)
			return r;
		r = deliver_take(map, until);
		if (!r) {
			/* After SHMQ_CORRUPT this queue stays dirty; the others are repaired. */
			(void)queue_repair(b, map);
			queue_unlock(map);
		}
		map_release(map);
		if (r)
			return r;
		SHMQ_KILLPOINT("recover.topic_queue");
	}
	writer_recover(b, topic);
	/* The dead process may have entered a queue without raising `version`: make every producer list
	 * the queues again. */
	atomic_fetch_add(&t->version, 1);
	st(&t->dirty, 0);
	return 0;
}

int topic_lock(shmq_broker *b, shmq_topic_desc *t, int64_t until)
{
	int r = lock_take(&t->publish, until);

	if (r == SHMQ_LOCK_DIED) {
		st(&t->dirty, 1);
		SHMQ_KILLPOINT("recover.topic_dirty");
		lock_consistent(&t->publish);
		r = 0;
	}
	if (r)
		return r;
	if (ld(&t->dirty)) {
		r = topic_recover(b, t, until);
		if (r)
			topic_unlock(t);
	}
	return r;
}

void topic_unlock(shmq_topic_desc *t)
{
	lock_drop(&t->publish);
}

int queue_lock(shmq_broker *b, shmq_map *map, int64_t until)
{
	for (;;) {
		shmq_topic_desc *t;
		int r = deliver_take(map, until);

		if (r)
			return r;
		if (queue_is_closed(map)) {
			queue_unlock(map);
			return SHMQ_GONE;
		}
		if (!ld(&map->q->dirty) && words_are_sane(map)) /* SYNC(dirty) */
			return 0;
		queue_unlock(map);
		t = topic_of(b, map);
		r = topic_lock(b, t, until);
		if (r)
			return r;
		r = queue_lock_under(b, map, until);
		if (!r)
			queue_unlock(map);
		topic_unlock(t);
		if (r)
			return r;
	}
}

int both_lock(shmq_broker *b, shmq_map *map, int64_t until)
{
	shmq_topic_desc *t = topic_of(b, map);
	int r = topic_lock(b, t, until);

	if (r)
		return r;
	r = queue_lock_under(b, map, until);
	if (r)
		topic_unlock(t);
	return r;
}

void both_unlock(shmq_broker *b, shmq_map *map)
{
	queue_unlock(map);
	topic_unlock(topic_of(b, map));
}

static int entered(shmq_broker *b, shmq_map *map, int64_t until,
                   int (*lock)(shmq_broker *, shmq_map *, int64_t), shmq_map **out)
{
	int r;

	client_note_queue(b, map->index);
	r = lock(b, map, until);
	if (r)
		map_release(map);
	else
		*out = map;
	return r;
}

int queue_enter(shmq_broker *b, uint32_t queue, int64_t until, shmq_map **out)
{
	shmq_map *map;
	int r = map_get(b, queue, &map);

	return r ? r : entered(b, map, until, queue_lock, out);
}

int both_enter(shmq_broker *b, uint32_t queue, int64_t until, shmq_map **out)
{
	shmq_map *map;
	int r = map_get(b, queue, &map);

	return r ? r : entered(b, map, until, both_lock, out);
}

int queue_enter_serial(shmq_broker *b, uint32_t queue, uint64_t serial, int64_t until,
                       shmq_map **out)
{
	shmq_map *map;
	int r = usable_status(b);

	if (!r)
		r = map_get_serial(b, queue, serial, &map);
	return r ? r : entered(b, map, until, queue_lock, out);
}

static int rebuild(shmq_broker *b, uint32_t queue, int64_t until, bool adopting)
{
	shmq_map *map;
	int r = both_enter(b, queue, until, &map);

	if (r)
		return r;
	r = queue_rebuild(b, map, adopting);
	both_unlock(b, map);
	map_release(map);
	return r;
}

int shmq_rebuild(shmq_broker *b, uint32_t queue, int64_t until)
{
	return rebuild(b, queue, until, false);
}

int shmq_adopt(shmq_broker *b, uint32_t queue, int64_t until)
{
	return rebuild(b, queue, until, true);
}

int shmq_audit(shmq_broker *b, uint32_t queue, int64_t until, bool *repaired)
{
	shmq_map *map;
	int r;

	*repaired = false;
	r = both_enter(b, queue, until, &map);
	if (r)
		return r;
	*repaired = !adds_up(map);
	if (*repaired)
		r = queue_repair(b, map);
	both_unlock(b, map);
	map_release(map);
	return r;
}
