/*
 * Locking the registry, a topic's publish lock (P) and a queue's deliver lock (D), and noticing
 * that a holder died.
 *
 *   P died   topic.dirty = 1, the lock is made consistent; then each queue of the topic is rebuilt
 *            with its D held; dirty is cleared last. Every later locker of P does this first while
 *            it is set.
 *   D died   queue.dirty = 1, the lock is made consistent, D is released; P and D are taken and the
 *            queue is rebuilt: never under D alone, because a publisher moves the other half meanwhile.
 *
 * If a rebuild cannot finish (a queue is not mapped yet, a lock is held by a stopped process) the
 * locks stay usable and `dirty` stays set.
 */
#include "locking.h"

#include "atomics.h"
#include "handles.h"
#include "killpoint.h"
#include "lock.h"
#include "mapping.h"
#include "plant.h"
#include "rebuild.h"
#include "segment.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "slots.h"
#include "writer.h"

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
	if (!SHMQ_PLANTED(7))
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
	if (!ld(&map->q->dirty) && words_are_sane(map))
		return 0;
	r = queue_repair(b, map);
	if (r)
		queue_unlock(map);
	return r;
}

/* Rebuild every queue of a topic whose holder of the publish lock (P) died. P is held. */
static int topic_recover(shmq_broker *b, shmq_topic_desc *t, int64_t until)
{
	uint32_t topic = (uint32_t)(t - b->topics), n = queues_of(b);

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
			(void)queue_repair(b, map); /* SHMQ_CORRUPT: this queue stays dirty; the others need not */
			queue_unlock(map);
		}
		map_release(map);
		if (r)
			return r;
		SHMQ_KILLPOINT("recover.topic_queue");
	}
	writer_recover(b, topic);
	/* It may have died between a queue's entry and this store: every producer lists the queues
	 * again. */
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
		if (!SHMQ_PLANTED(8))
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
		if (!ld(&map->q->dirty) && words_are_sane(map))
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

int shmq_rebuild(shmq_broker *b, uint32_t queue, int64_t until)
{
	shmq_map *map;
	int r = map_get(b, queue, &map);

	if (r)
		return r;
	r = both_lock(b, map, until);
	if (!r) {
		r = queue_rebuild(b, map, false);
		both_unlock(b, map);
	}
	map_release(map);
	return r;
}

int shmq_audit(shmq_broker *b, uint32_t queue, int64_t until, bool *repaired)
{
	shmq_map *map;
	int r = map_get(b, queue, &map);

	*repaired = false;
	if (r)
		return r;
	touch(b, queue);
	r = both_lock(b, map, until);
	if (!r) {
		*repaired = !adds_up(map);
		if (*repaired)
			r = queue_repair(b, map);
		both_unlock(b, map);
	}
	map_release(map);
	return r;
}

int shmq_adopt(shmq_broker *b, uint32_t queue, int64_t until)
{
	shmq_map *map;
	int r = map_get(b, queue, &map);

	if (r)
		return r;
	r = both_lock(b, map, until);
	if (!r) {
		r = queue_rebuild(b, map, true);
		both_unlock(b, map);
	}
	map_release(map);
	return r;
}
