/*
 * The producer's handle, and the steps of a publish that publish.c, loan.c and backlog.c share.
 * All of it is under the publish lock (P).
 */
#include "producer.h"

#include "atomics.h"
#include "clock.h"
#include "doorbell.h"
#include "handles.h"
#include "killpoint.h"
#include "locking.h"
#include "mapping.h"
#include "plant.h"
#include "room.h"
#include "segment.h"
#include "shmq.h"
#include "slots.h"
#include "status.h"

#include <stdlib.h>
#include <string.h>

int shmq_producer_open(shmq_broker *b, uint32_t topic, uint32_t generation, shmq_producer **out)
{
	shmq_producer *p;
	int r = usable_status(b);

	if (r)
		return r;
	if (topic >= topics_of(b))
		return SHMQ_INVALID;
	p = calloc(1, sizeof(*p));
	if (!p)
		return SHMQ_NO_MEMORY;
	broker_hold(b);
	p->b = b;
	p->t = &b->topics[topic];
	p->topic = topic;
	p->generation = generation;
	*out = p;
	return 0;
}

static void list_drop(shmq_producer *p)
{
	for (uint32_t i = 0; i < p->channels + p->backlog; i++)
		map_put(p->b, p->maps[i]);
	free(p->maps);
	p->maps = NULL;
	p->channels = p->backlog = 0;
	p->listed = false;
}

void shmq_producer_close(shmq_producer *p)
{
	shmq_broker *b = p->b;

	list_drop(p);
	map_release(p->lacking);
	free(p);
	broker_release(b);
}

/* Publishers that wait for its room look at the topic again. */
static void lacking_drop(shmq_producer *p)
{
	shmq_map *old;

	pthread_mutex_lock(&p->b->mutex); /* as note_lacking */
	old = p->lacking;
	p->lacking = NULL;
	pthread_mutex_unlock(&p->b->mutex);
	map_put(p->b, old);
}

/* List the topic's queues again if its version has changed. Under P; this is the only allocation
 * made under it, and only when a queue was made or deleted. */
static int list_refresh(shmq_producer *p)
{
	shmq_broker *b = p->b;
	uint64_t version = ld(&p->t->version);
	uint32_t n = queues_of(b), count = 0, backlog = SHMQ_NONE;
	int r = 0;

	if (p->listed && p->version == version && p->attached_as == b->client_generation)
		return 0;
	list_drop(p);
	lacking_drop(p);
	for (uint32_t i = 0; i < n; i++)
		count += entry_is(b, i, p->topic);
	p->maps = calloc(count + 1, sizeof(shmq_map *));
	if (!p->maps)
		return SHMQ_NO_MEMORY;
	for (uint32_t i = 0; i < n && !r; i++) {
		if (!entry_is(b, i, p->topic))
			continue;
		if (ld_acquire(&b->entries[i].role) == SHMQ_ROLE_BACKLOG) {
			backlog = i;
			continue;
		}
		r = map_get(b, i, &p->maps[p->channels]);
		p->channels += !r;
		if (!r)
			touch(b, i);
	}
	if (!r && backlog != SHMQ_NONE) {
		r = map_get(b, backlog, &p->maps[p->channels]);
		p->backlog = !r;
		if (!r)
			touch(b, backlog);
	}
	if (r) {
		list_drop(p);
		return r;
	}
	p->version = version;
	p->attached_as = b->client_generation;
	p->listed = true;
	return 0;
}

int producer_lock(shmq_producer *p, int64_t until, shmq_map ***targets, uint32_t *count)
{
	shmq_topic_desc *t = p->t;
	int r = usable_status(p->b);

	if (!r)
		r = topic_lock(p->b, t, until);
	if (r)
		return r;
	if (ld(&t->state) != SHMQ_ENTRY_LIVE || ld(&t->generation) != p->generation ||
	    ld(&p->b->d->segment.ready) != SHMQ_READY_STATE)
		r = SHMQ_GONE;
	else if (ld(&p->b->d->stopping))
		r = because(SHMQ_NOT_RUNNING, "the broker is stopping");
	else
		r = list_refresh(p);
	if (r)
		goto out;
	/* While the backlog is not empty the topic goes on publishing into it: first in, first out. */
	if (p->channels && !ld(&t->paused) &&
	    !(p->backlog && !queue_is_empty(p->maps[p->channels]->q))) {
		*targets = p->maps;
		*count = p->channels;
		return 0;
	}
	if (p->backlog) {
		*targets = &p->maps[p->channels];
		*count = 1;
		return 0;
	}
	r = SHMQ_NEED_BACKLOG;
out:
	topic_unlock(t);
	return r;
}

bool fanout_pumps(shmq_producer *p, shmq_map **targets)
{
	if (targets == p->maps || !p->channels || ld(&p->t->paused))
		return false;
	attend(p->b, targets[0]->index);
	return true;
}

void note_lacking(shmq_producer *p, shmq_map *map)
{
	shmq_map *old = NULL;

	pthread_mutex_lock(&p->b->mutex); /* another thread may just be about to wait for the old one */
	if (p->lacking != map) {
		map_hold(map);
		old = p->lacking;
		p->lacking = map;
	}
	pthread_mutex_unlock(&p->b->mutex);
	map_release(old);
}

uint64_t message_id(const shmq_broker *b, uint64_t clock)
{
	return clock << SHMQ_ID_NODE_BITS | b->d->limits.node_id;
}

uint64_t fanout_clock(shmq_topic_desc *t, uint32_t n, int64_t now)
{
	uint64_t clock = (uint64_t)(now - SHMQ_EPOCH_NS) / SHMQ_ID_UNIT_NS, last = ld(&t->id_clock);

	if (now < SHMQ_EPOCH_NS || clock <= last)
		clock = last + 1;
	st(&t->id_clock, clock + n - 1);
	return clock;
}

void fanout_flip(shmq_broker *b, shmq_map *map, const uint32_t *slots, uint32_t first, uint32_t n,
                 int64_t due, uint64_t bytes)
{
	shmq_queue_desc *q = map->q;
	_Atomic uint32_t *tail = due ? &q->defer_tail : &q->ready_tail;
	uint32_t *ring = due ? map->defer : map->ready, mask = ring_mask_of(map), at = ld(tail);

	for (uint32_t i = 0; i < n; i++) {
		uint32_t slot = slots ? slots[i] : map->free[(first + i) & mask];
		shmq_slot_desc *s = &map->slots[slot];

		if (!slot_is(map, slot, SHMQ_PREPARED)) { /* it was overwritten meanwhile: the commit word decides */
			st(&topic_of(b, map)->dirty, 1);
			continue;
		}
		st_release(&s->word, word_next(ld(&s->word), due ? SHMQ_DEFERRED : SHMQ_READY));
		SHMQ_KILLPOINT("publish.flipped");
		ring[at++ & mask] = slot;
	}
	SHMQ_KILLPOINT("publish.ring");
	st_release(tail, at);
	SHMQ_KILLPOINT("publish.tail");
	bump(&q->enqueued, n);
	bump(&q->enqueued_bytes, bytes);
	if (due)
		due_note(b, map->index, due);
}

/* The number of READY messages above which the spiller is rung: three quarters of the budget, so
 * that it comes early. Once something is on disk, every new message waits behind it anyway. */
static uint32_t high_water(const shmq_broker *b, const shmq_map *map)
{
	if (!b->d->limits.mem_queue_size)
		return 0;
	return ready_budget(map) / 4 * (on_disk(map->q) ? 2 : 3);
}

bool fanout_overflows(shmq_broker *b, shmq_map *map, uint32_t n, bool deferred)
{
	shmq_queue_desc *q = map->q;
	uint32_t mark = high_water(b, map), ready = ready_seen(q, mark);
	bool over = ready > mark && ready - mark <= n; /* it was rung when the mark was passed */

	over |= ld(&q->arena_committed) == map->arena_max && q->arena.free_bytes < map->arena_max / 8;
	over |= deferred && defers_many(map);
	over &= !(q->flags & SHMQ_FLAG_EPHEMERAL);
	if (over)
		attend(b, map->index);
	return over;
}

void fanout_prepare(shmq_slot_desc *s, uint64_t id, uint64_t seq, int64_t now, int64_t due,
                    uint64_t length)
{
	if (SHMQ_PLANTED(1))
		st_release(&s->word, word_next(ld(&s->word), SHMQ_PREPARED));
	s->id = id;
	s->timestamp = now;
	s->order = seq;
	if (!SHMQ_PLANTED(3))
		s->deadline = due;
	s->length = (uint32_t)length;
	s->attempts = 0;
	s->heap = SHMQ_NONE;
	SHMQ_KILLPOINT("publish.fields");
	st_release(&s->word, word_next(ld(&s->word), SHMQ_PREPARED));
	SHMQ_KILLPOINT("publish.prepared");
}

int fanout_abort(shmq_topic_desc *t)
{
	st(&t->dirty, 1);
	topic_unlock(t);
	return SHMQ_AGAIN;
}

int check_bodies(shmq_producer *p, const shmq_body *bodies, uint32_t n, uint64_t *lengths,
                 bool *large)
{
	uint64_t most = p->b->d->limits.max_msg_size;

	*large = false;
	if (!n)
		return because(SHMQ_INVALID, "a batch must hold at least one message");
	for (uint32_t i = 0; i < n; i++) {
		if (!bodies[i].length)
			return because(SHMQ_INVALID, "message %u is empty; nsqd's rule: 1 byte or more", i);
		if (bodies[i].length > most || bodies[i].length > MOST_BODY)
			return because(SHMQ_TOO_BIG,
			               "message %u has %llu bytes; max_msg_size is %llu: raise that option of "
			               "the broker",
			               i, (unsigned long long)bodies[i].length, (unsigned long long)most);
		lengths[i] = bodies[i].length;
		*large |= bodies[i].length >= SHMQ_LARGE;
	}
	return 0;
}

int check_due(const shmq_producer *p, int64_t due)
{
	int64_t most = p->b->d->limits.max_req_timeout;

	if (due && due - realtime_ns() > most)
		return because(SHMQ_INVALID,
		               "deferred for longer than max_req_timeout (%lld ms): raise that option of "
		               "the broker",
		               (long long)(most / NS_PER_MS));
	return 0;
}

void fanout_skip_none(uint64_t *skip, uint32_t count)
{
	skip[0] = 0;
	if (count > 64)
		memset(skip, 0, (count + 63) / 64 * sizeof(*skip));
}

int fanout_room(shmq_producer *p, shmq_map **targets, uint32_t count, const uint64_t *lengths,
                uint32_t n, bool deferred, int64_t until, uint64_t *skip)
{
	for (uint32_t k = 0; k < count; k++) {
		int r = room_for(p->b, targets[k], lengths, n, deferred ? FOR_DEFERRED : FOR_READY, until);

		if (r == SHMQ_FULL && targets[k]->q->flags & SHMQ_FLAG_EPHEMERAL) {
			SKIP(skip, k);
			continue;
		}
		if (r == SHMQ_GONE)
			r = SHMQ_AGAIN; /* it was deleted just now: list the queues again */
		if (r == SHMQ_FULL)
			note_lacking(p, targets[k]);
		if (r)
			return r;
	}
	return 0;
}

int shmq_producer_wait(shmq_producer *p, int64_t deadline)
{
	shmq_broker *b = p->b;
	shmq_map *map;
	uint32_t bell;
	bool slept;
	int r = usable_status(b);

	if (r)
		return r;
	pthread_mutex_lock(&b->mutex);
	map = p->lacking;
	if (map)
		map_hold(map);
	pthread_mutex_unlock(&b->mutex);
	if (!map || bell_get(b, &bell)) {
		struct timespec t = timespec_of(NS_PER_MS);

		map_release(map);
		if (clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL))
			return SHMQ_INTERRUPTED;
		return now_ns() < deadline ? 0 : SHMQ_TIMEOUT;
	}
	wait_announce(&map->q->space, bell);
	if (ring_count(&map->q->ready_head, &map->q->ready_tail) > ready_budget(map) / 4 * 3 ||
	    ld(&map->q->need_bytes))
		r = bell_wait(b, bell, deadline, 10 * NS_PER_MS, &slept);
	wait_withdraw(&map->q->space, bell);
	bell_put(b, bell);
	map_release(map);
	return r;
}
