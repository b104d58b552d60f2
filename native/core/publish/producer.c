/* The producer's handle: the list of its topic's queues, and the queue that it waits for. */
#include "publish/producer.h"

#include "base/atomics.h"
#include "base/clock.h"
#include "base/status.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "memory/properties.h"
#include "memory/segment.h"
#include "publish/room.h"
#include "queue/locking.h"
#include "queue/settings.h"
#include "queue/slots.h"
#include "shmq.h"
#include "sync/doorbell.h"

#include <stdio.h>
#include <stdlib.h>

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

/* Forget the queue that had no room. Publishers that wait for it look at the topic again. */
static void lacking_drop(shmq_producer *p)
{
	shmq_map *old;

	pthread_mutex_lock(&p->b->mutex); /* as note_lacking */
	old = p->lacking;
	p->lacking = NULL;
	pthread_mutex_unlock(&p->b->mutex);
	map_put(p->b, old);
}

/* Take the channels that are not sealed off the list of a sealed topic, if one is sealed: they were
 * there before its pool or queue, so nobody reads what is put into it, and it would pile up. Those of
 * a topic with dead letters stay. Under P, where all of these policies change. */
static void list_close(shmq_producer *p)
{
	uint32_t kept = 0, sealed = 0;

	if (!(ld(&p->t->policy) & SHMQ_POLICY_SEALED) || p->t->flags & SHMQ_FLAG_DEAD)
		return;
	for (uint32_t i = 0; i < p->channels; i++)
		sealed += has_policy(p->maps[i], SHMQ_POLICY_SEALED) != 0;
	if (!sealed)
		return;
	for (uint32_t i = 0; i < p->channels; i++) {
		if (has_policy(p->maps[i], SHMQ_POLICY_SEALED))
			p->maps[kept++] = p->maps[i];
		else
			map_put(p->b, p->maps[i]);
	}
	p->channels = kept;
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
		if (ld_acquire(&b->entries[i].role) == SHMQ_ROLE_BACKLOG) { /* SYNC(entry-role) */
			backlog = i;
			continue;
		}
		r = map_get(b, i, &p->maps[p->channels]);
		p->channels += !r;
		if (!r)
			client_note_queue(b, i);
	}
	if (!r)
		list_close(p);
	if (!r && backlog != SHMQ_NONE) {
		r = map_get(b, backlog, &p->maps[p->channels]);
		p->backlog = !r;
		if (!r)
			client_note_queue(b, backlog);
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
		r = fail(SHMQ_NOT_RUNNING, "the broker is stopping");
	else
		r = list_refresh(p);
	if (r)
		goto out;
	/* While the backlog is not empty the topic goes on publishing into it, so the order is kept. */
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

void shmq_producer_seal(shmq_producer *p)
{
	p->sealed = true;
}

void note_lacking(shmq_producer *p, shmq_map *map, uint32_t n, uint64_t bytes)
{
	shmq_map *old = NULL;

	pthread_mutex_lock(&p->b->mutex); /* another thread may just be about to wait for the old one */
	if (p->lacking != map) {
		map_hold(map);
		old = p->lacking;
		p->lacking = map;
	}
	p->lacking_n = n;
	p->lacking_bytes = bytes;
	pthread_mutex_unlock(&p->b->mutex);
	map_release(old);
}

int check_bodies(shmq_producer *p, const shmq_body *bodies, uint32_t n, uint64_t *lengths,
                 bool *large)
{
	uint64_t most = p->b->d->limits.max_msg_size;

	*large = false;
	if (!n)
		return fail(SHMQ_INVALID, "a batch must hold at least one message");
	for (uint32_t i = 0; i < n; i++) {
		if (!bodies[i].length)
			return fail(SHMQ_INVALID, "message %u is empty; nsqd's rule: 1 byte or more", i);
		if (bodies[i].length > most || bodies[i].length > MOST_BODY)
			return fail(SHMQ_TOO_BIG,
			            "message %u has %llu bytes; max_msg_size is %llu: raise that option of "
			            "the broker (--max-msg-size)",
			            i, (unsigned long long)bodies[i].length, (unsigned long long)most);
		lengths[i] = bodies[i].length;
		*large |= bodies[i].length >= SHMQ_LARGE;
	}
	return 0;
}

int check_properties(const shmq_producer *p, const shmq_body *properties, uint32_t n,
                     uint64_t *lengths, uint32_t *blocks)
{
	uint64_t most = p->b->d->limits.max_msg_size;
	int r = properties_check_all(properties, n);

	for (uint32_t i = 0; !r && i < n; i++) {
		blocks[i] = (uint32_t)properties[i].length;
		/* so that a nsqd with the same limit accepts the record of such a message, too */
		if (blocks[i] && lengths[i] + blocks[i] + SHMQ_ENVELOPE > most)
			r = fail(SHMQ_TOO_BIG,
			         "message %u has %llu bytes and %u of properties, with %u more on disk; "
			         "max_msg_size is %llu: raise that option of the broker "
			         "(--max-msg-size)",
			         i, (unsigned long long)lengths[i], blocks[i], SHMQ_ENVELOPE,
			         (unsigned long long)most);
		lengths[i] += blocks[i];
	}
	return r;
}

int check_due(const shmq_producer *p, int64_t due)
{
	int64_t most = p->b->d->limits.max_req_timeout;

	if (due && due - realtime_ns() > most)
		return fail(SHMQ_INVALID,
		            "deferred for longer than max_req_timeout (%lld ms): raise that option of "
		            "the broker",
		            (long long)(most / NS_PER_MS));
	return 0;
}

bool shmq_producer_lacks(shmq_producer *p, char *text, size_t size)
{
	shmq_broker *b = p->b;
	shmq_map *map;
	const shmq_entry_desc *e;
	bool channel;

	if (usable_status(b))
		return false;
	pthread_mutex_lock(&b->mutex); /* as note_lacking */
	map = p->lacking;
	if (map)
		map_hold(map);
	pthread_mutex_unlock(&b->mutex);
	if (!map)
		return false;
	e = &b->entries[map->index];
	channel = ld(&e->role) == SHMQ_ROLE_CHANNEL;
	snprintf(text, size,
	         "%.64s%s%.64s holds all that mem_queue_size (%u) and arena_size (%llu) allow",
	         topic_of(b, map)->name, channel ? "/" : "", channel ? e->name : "",
	         map->mem_queue_size, (unsigned long long)map->arena_max);
	map_release(map);
	return true;
}

int shmq_producer_wait(shmq_producer *p, int64_t deadline)
{
	shmq_broker *b = p->b;
	shmq_map *map;
	uint32_t bell;
	uint64_t n = 0, bytes = 0;
	bool slept, lacks;
	int r = usable_status(b);

	if (r)
		return r;
	pthread_mutex_lock(&b->mutex);
	map = p->lacking;
	if (map) {
		map_hold(map);
		n = p->lacking_n;
		bytes = p->lacking_bytes;
	}
	pthread_mutex_unlock(&b->mutex);
	if (!map || bell_get(b, &bell)) {
		map_release(map);
		return bell_none(deadline, NS_PER_MS);
	}
	wait_announce(&map->q->space, bell);
	if (n && has_policy(map, SHMQ_POLICY_LIMITS) && !limits_leave(map, n, bytes))
		lacks = true;
	else
		lacks = ring_count(&map->q->ready_head, &map->q->ready_tail) > ready_budget(map) / 4 * 3 ||
		        (!n && ld(&map->q->need_bytes));
	if (lacks)
		r = bell_wait(b, bell, deadline, 10 * NS_PER_MS, &slept);
	wait_withdraw(&map->q->space, bell);
	bell_put(b, bell);
	map_release(map);
	return r;
}
