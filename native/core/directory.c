/*
 * Names to topics and queues; the registry lock. An entry's fields are written first, its state (or
 * its role) last: that one store makes it exist. Nothing in the directory is derived, so a death
 * under the registry lock needs no repair.
 */
#include "internal.h"
#include "owner.h"

#include <string.h>
#include <unistd.h>

bool shmq_name_ephemeral(const char *name, size_t length)
{
	static const char suffix[] = "#ephemeral";
	size_t n = sizeof(suffix) - 1;

	return length > n && !memcmp(name + length - n, suffix, n);
}

bool shmq_name_valid(const char *name, size_t length)
{
	size_t plain = length;

	if (!length || length > 64)
		return false;
	if (shmq_name_ephemeral(name, length))
		plain -= 10;
	for (size_t i = 0; i < plain; i++) {
		char c = name[i];

		if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
		      c == '.' || c == '_' || c == '-'))
			return false;
	}
	return true;
}

static bool name_ok(const char *name)
{
	return shmq_name_valid(name, strlen(name));
}

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

/* A reader without a lock: are the fields that it read all of the entry's life number `before`? An
 * entry that was removed and taken for another name has another generation. */
static bool unchanged(const _Atomic uint32_t *generation, uint32_t before)
{
	fence_acquire();
	return ld(generation) == before;
}

int shmq_topic_find(shmq_broker *b, const char *name, uint32_t *topic, uint32_t *generation)
{
	uint32_t n = topics_of(b);

	for (uint32_t i = 0; i < n; i++) {
		shmq_topic_desc *t = &b->topics[i];
		uint32_t before = ld_acquire(&t->generation);

		if (ld_acquire(&t->state) == SHMQ_ENTRY_LIVE && !strncmp(t->name, name, SHMQ_NAME)) {
			*topic = i;
			*generation = before;
			if (unchanged(&t->generation, before))
				return 0;
		}
	}
	return SHMQ_GONE;
}

bool entry_is(const shmq_broker *b, uint32_t index, uint32_t topic)
{
	shmq_entry_desc *e = &b->entries[index];

	return ld_acquire(&e->state) == SHMQ_ENTRY_LIVE && e->topic == topic;
}

int shmq_queue_find(shmq_broker *b, uint32_t topic, const char *channel, uint32_t *queue,
                    uint64_t *serial)
{
	uint32_t n = queues_of(b);

	for (uint32_t i = 0; i < n; i++) {
		shmq_entry_desc *e = &b->entries[i];
		uint32_t before = ld_acquire(&e->generation);
		bool is_channel;

		if (!entry_is(b, i, topic))
			continue;
		is_channel = ld_acquire(&e->role) == SHMQ_ROLE_CHANNEL;
		if (channel ? is_channel && !strncmp(e->name, channel, SHMQ_NAME) : !is_channel) {
			*queue = i;
			*serial = e->serial;
			if (unchanged(&e->generation, before))
				return 0;
		}
	}
	return SHMQ_GONE;
}

static void changed(shmq_broker *b)
{
	atomic_fetch_add(&b->d->generation, 1);
	supervisor_ring(b, RING_CHANGED);
}

int shmq_topic_create(shmq_broker *b, const char *name, uint64_t clock_floor, int64_t until,
                      uint32_t *topic, uint32_t *generation)
{
	shmq_topic_desc *t = NULL;
	uint32_t n, i;
	int r;

	if (!name_ok(name))
		return SHMQ_BAD_NAME;
	r = registry_lock(b, until);
	if (r)
		return r;
	r = shmq_topic_find(b, name, topic, generation);
	if (!r)
		goto out;
	n = topics_of(b);
	for (i = 0; i < n && !t; i++)
		if (ld(&b->topics[i].state) == SHMQ_ENTRY_FREE)
			t = &b->topics[i];
	if (!t) {
		uint32_t more = n + 12 < SHMQ_TOPICS ? n + 12 : SHMQ_TOPICS;

		r = n == SHMQ_TOPICS ? SHMQ_TABLE_FULL : directory_whole(b);
		if (!r)
			r = segment_commit(b->base, (uint64_t)((uint8_t *)&b->topics[n] - b->base),
			                   (more - n) * sizeof(*t));
		for (i = n; !r && i < more; i++)
			r = lock_init(&b->topics[i].publish);
		if (r)
			goto out;
		st_release(&b->d->topics_committed, more);
		t = &b->topics[n];
	}
	memset(t->name, 0, sizeof(t->name));
	strcpy(t->name, name);
	t->flags = shmq_name_ephemeral(name, strlen(name)) ? SHMQ_FLAG_EPHEMERAL : 0;
	st(&t->paused, 0);
	st(&t->committed, 0);
	st(&t->id_clock, clock_floor);
	st(&t->messages, 0);
	st(&t->bytes, 0);
	atomic_fetch_add(&t->version, 1);
	SHMQ_KILLPOINT("create_topic.filled");
	st_release(&t->state, SHMQ_ENTRY_LIVE);
	*topic = (uint32_t)(t - b->topics);
	*generation = ld(&t->generation);
	changed(b);
	r = 0;
out:
	registry_unlock(b);
	return r;
}

int shmq_queue_reserve(shmq_broker *b, int64_t until, uint32_t *queue, uint64_t *serial)
{
	uint32_t n, i;
	int r = registry_lock(b, until);

	if (r)
		return r;
	n = queues_of(b);
	for (i = 0; i < n; i++)
		if (ld(&b->entries[i].state) == SHMQ_ENTRY_FREE)
			break;
	if (i == n) {
		uint32_t more = n + 21 < SHMQ_QUEUES ? n + 21 : SHMQ_QUEUES;

		r = n == SHMQ_QUEUES ? SHMQ_TABLE_FULL : directory_whole(b);
		if (!r)
			r = segment_commit(b->base, (uint64_t)((uint8_t *)&b->entries[n] - b->base),
			                   (more - n) * sizeof(shmq_entry_desc));
		if (!r)
			st_release(&b->d->queues_committed, more);
	}
	if (!r) {
		*queue = i;
		*serial = atomic_fetch_add(&b->d->next_serial, 1);
	}
	registry_unlock(b);
	return r;
}

/* Registry and P of a live topic. */
static int registry_and_topic(shmq_broker *b, uint32_t topic, int64_t until)
{
	int r = topic < topics_of(b) ? registry_lock(b, until) : SHMQ_INVALID;

	if (r)
		return r;
	r = topic_lock(b, &b->topics[topic], until);
	if (!r && ld(&b->topics[topic].state) != SHMQ_ENTRY_LIVE) {
		topic_unlock(&b->topics[topic]);
		r = SHMQ_GONE;
	}
	if (r)
		registry_unlock(b);
	return r;
}

static void registry_and_topic_unlock(shmq_broker *b, uint32_t topic)
{
	topic_unlock(&b->topics[topic]);
	changed(b);
	registry_unlock(b);
}

int shmq_queue_enter(shmq_broker *b, uint32_t queue, uint64_t serial, uint32_t topic,
                     const char *channel, int64_t until)
{
	shmq_entry_desc *e = &b->entries[queue];
	uint32_t other;
	uint64_t other_serial;
	int r;

	if (channel && !name_ok(channel))
		return SHMQ_BAD_NAME;
	r = registry_and_topic(b, topic, until);
	if (r)
		return r;
	if (ld(&e->state) != SHMQ_ENTRY_FREE || !shmq_queue_find(b, topic, channel, &other, &other_serial)) {
		r = SHMQ_INVALID;
		goto out;
	}
	memset(e->name, 0, sizeof(e->name));
	if (channel)
		strcpy(e->name, channel);
	e->serial = serial;
	e->topic = topic;
	e->flags = channel && shmq_name_ephemeral(channel, strlen(channel)) ? SHMQ_FLAG_EPHEMERAL : 0;
	st(&e->role, channel ? SHMQ_ROLE_CHANNEL : SHMQ_ROLE_BACKLOG);
	st(&b->next_deadline[queue], INT64_MAX);
	st(&b->next_due[queue], INT64_MAX);
	SHMQ_KILLPOINT("enter_queue.filled");
	st_release(&e->state, SHMQ_ENTRY_LIVE);
	SHMQ_KILLPOINT("enter_queue.live");
	atomic_fetch_add(&b->topics[topic].version, 1);
out:
	registry_and_topic_unlock(b, topic);
	return r;
}

int shmq_queue_take_over(shmq_broker *b, uint32_t topic, const char *channel, int64_t until,
                         uint32_t *queue, uint64_t *serial)
{
	shmq_map *map = NULL;
	shmq_entry_desc *e;
	uint32_t i;
	int r;

	if (!name_ok(channel))
		return SHMQ_BAD_NAME;
	r = registry_and_topic(b, topic, until);
	if (r)
		return r;
	if (ld(&b->topics[topic].paused)) {
		r = SHMQ_INVALID;
		goto out;
	}
	for (i = 0; i < queues_of(b); i++)
		if (entry_is(b, i, topic) && ld(&b->entries[i].role) == SHMQ_ROLE_CHANNEL) {
			r = SHMQ_INVALID;
			goto out;
		}
	r = shmq_queue_find(b, topic, NULL, queue, serial);
	if (!r)
		r = map_get_serial(b, *queue, *serial, &map);
	if (!r)
		r = queue_lock_under(b, map, until);
	if (r)
		goto out;
	e = &b->entries[*queue];
	memset(e->name, 0, sizeof(e->name));
	strcpy(e->name, channel);
	if (shmq_name_ephemeral(channel, strlen(channel))) {
		e->flags |= SHMQ_FLAG_EPHEMERAL;
		map->q->flags |= SHMQ_FLAG_EPHEMERAL;
	}
	st(&map->q->base_pending, 1);
	SHMQ_KILLPOINT("take_over.named");
	st_release(&e->role, SHMQ_ROLE_CHANNEL);
	SHMQ_KILLPOINT("take_over.done");
	queue_unlock(map);
	atomic_fetch_add(&b->topics[topic].version, 1);
out:
	map_release(map);
	registry_and_topic_unlock(b, topic);
	return r;
}

int shmq_queue_renamed(shmq_broker *b, uint32_t queue, const char *base, int64_t until)
{
	shmq_map *map;
	int r = strlen(base) < SHMQ_BASE ? map_get(b, queue, &map) : SHMQ_INVALID;

	if (r)
		return r;
	r = queue_lock(b, map, until);
	if (!r) {
		memset(map->q->base, 0, SHMQ_BASE);
		strcpy(map->q->base, base);
		st(&map->q->base_pending, 0);
		queue_unlock(map);
	}
	map_release(map);
	return r;
}

/* Everybody who waits on it looks again and finds it gone. */
static void close_queue(shmq_broker *b, shmq_map *map)
{
	st_release(&map->q->segment.ready, SHMQ_CLOSED_STATE);
	wait_wake(b, &map->q->takers, WAKE_ALL);
	wait_wake(b, &map->q->space, WAKE_ALL);
}

/* D of a closed queue, if nobody is in it or died in it. Whoever comes now finds it closed. */
static bool deliver_try(shmq_map *map)
{
	int r = lock_take(&map->q->deliver, 0);

	if (r == SHMQ_LOCK_DIED) {
		lock_consistent(&map->q->deliver);
		lock_drop(&map->q->deliver);
	}
	return !r;
}

/* Has the queue a consumer? One enters its session under D, and so finds it closed or stays in it. */
static bool has_session(shmq_map *map)
{
	uint32_t n = sessions_of(map);

	for (uint32_t i = 0; i < n; i++)
		if (ld(&map->sessions[i].client))
			return true;
	return false;
}

static int queue_remove(shmq_broker *b, uint32_t queue, uint64_t serial, bool was_closed, bool idle,
                        int64_t until, bool *removed)
{
	shmq_entry_desc *e = &b->entries[queue];
	shmq_map *map = NULL;
	bool deliver = false;
	uint32_t topic;
	int r;

	*removed = false;
	if (queue >= queues_of(b) || ld(&e->state) == SHMQ_ENTRY_FREE ||
	    e->serial != serial)
		return SHMQ_GONE;
	topic = e->topic;
	r = was_closed ? registry_lock(b, until) : map_get_serial(b, queue, serial, &map);
	if (r)
		return r;
	if (was_closed) { /* it cannot be mapped, so the repair of its topic is not to meet it */
		st_release(&e->state, SHMQ_ENTRY_DELETING);
		registry_unlock(b);
	}
	r = registry_and_topic(b, topic, until);
	if (r)
		goto out;
	if (idle) {
		int locked = queue_lock_under(b, map, 0); /* never waits for D with P held */

		deliver = !locked;
		if (locked == SHMQ_AGAIN || (deliver && has_session(map))) {
			if (deliver)
				queue_unlock(map);
			topic_unlock(&b->topics[topic]);
			registry_unlock(b);
			goto out;
		}
	}
	st_release(&e->state, SHMQ_ENTRY_DELETING);
	atomic_fetch_add(&b->topics[topic].version, 1);
	SHMQ_KILLPOINT("remove_queue.deleting");
	if (map)
		close_queue(b, map);
	SHMQ_KILLPOINT("remove_queue.closed");
	if (map && !deliver)
		deliver = deliver_try(map);
	if (deliver) {
		/* It may stay mapped for long: by who has a view, or has not looked at it since. */
		queue_discard(map);
		queue_unlock(map);
	}
	atomic_fetch_add(&e->generation, 1);
	st(&b->next_deadline[queue], INT64_MAX);
	st(&b->next_due[queue], INT64_MAX);
	st_release(&e->state, SHMQ_ENTRY_FREE);
	registry_and_topic_unlock(b, topic);
	shmq_broker_unmap(b, queue, serial);
	*removed = true;
out:
	map_release(map);
	return r;
}

int shmq_queue_remove(shmq_broker *b, uint32_t queue, uint64_t serial, bool was_closed,
                      int64_t until)
{
	bool removed;

	return queue_remove(b, queue, serial, was_closed, false, until, &removed);
}

int shmq_queue_remove_idle(shmq_broker *b, uint32_t queue, uint64_t serial, int64_t until,
                           bool *removed)
{
	return queue_remove(b, queue, serial, false, true, until, removed);
}

int shmq_topic_remove(shmq_broker *b, uint32_t topic, uint32_t generation, int64_t until)
{
	shmq_topic_desc *t = &b->topics[topic];
	int r = registry_and_topic(b, topic, until);

	if (r)
		return r;
	if (ld(&t->generation) != generation)
		r = SHMQ_GONE;
	for (uint32_t i = 0; !r && i < queues_of(b); i++)
		if (entry_is(b, i, topic))
			r = SHMQ_INVALID; /* its queues go first */
	if (!r) {
		atomic_fetch_add(&t->generation, 1);
		atomic_fetch_add(&t->version, 1);
		SHMQ_KILLPOINT("remove_topic.generation");
		st_release(&t->state, SHMQ_ENTRY_FREE);
	}
	registry_and_topic_unlock(b, topic);
	return r;
}

int shmq_topic_pause(shmq_broker *b, uint32_t topic, uint32_t generation, bool paused,
                     int64_t until)
{
	shmq_topic_desc *t = &b->topics[topic];
	uint64_t serial;
	uint32_t backlog;
	int r = usable_status(b);

	if (!r)
		r = registry_and_topic(b, topic, until);
	if (r)
		return r;
	if (ld(&t->generation) != generation) {
		r = SHMQ_GONE;
	} else {
		st(&t->paused, paused);
		atomic_fetch_add(&t->version, 1);
		if (!shmq_queue_find(b, topic, NULL, &backlog, &serial))
			attend(b, backlog); /* it may have to move */
	}
	registry_and_topic_unlock(b, topic);
	supervisor_ring(b, RING_SPILLER);
	return r;
}

int shmq_channel_pause(shmq_broker *b, uint32_t queue, uint64_t serial, bool paused, int64_t until)
{
	shmq_map *map;
	int r = usable_status(b);

	if (!r)
		r = map_get_serial(b, queue, serial, &map);
	if (r)
		return r;
	touch(b, queue);
	r = queue_lock(b, map, until);
	if (!r) {
		st(&map->q->paused, paused);
		queue_unlock(map);
		wait_wake(b, &map->q->takers, WAKE_ALL);
		changed(b);
	}
	map_release(map);
	return r;
}

/* ---- supervisor's header, requests ---- */

bool shmq_supervisor_alive(shmq_broker *b)
{
	uint32_t client = ld_acquire(&b->d->supervisor_client);
	shmq_lock_desc *life;
	int r;

	if (!client || client > clients_of(b))
		return false;
	if (b->attached && client == b->client + 1)
		return true;
	life = &b->clients[client - 1].life;
	r = lock_take(life, 0);
	if (r == SHMQ_AGAIN)
		return true;
	if (r == SHMQ_LOCK_DIED)
		lock_consistent(life);
	if (r == 0 || r == SHMQ_LOCK_DIED)
		lock_drop(life);
	/* Only its thread may have ended. */
	return ld(&b->clients[client - 1].orphan) &&
	       process_identify(ld(&b->d->supervisor_pid)).start_time ==
	               ld(&b->d->supervisor_start_time);
}

int shmq_data_path_set(shmq_broker *b, const char *path)
{
	_Atomic char *first = (_Atomic char *)b->d->data_path;
	char *to = b->d->data_path;
	size_t n = strlen(path);
	int r = usable_status(b);

	if (r || (n < SHMQ_DATA_PATH && !strncmp(to, path, SHMQ_DATA_PATH)))
		return r;
	/* The first byte last: a death on the way leaves none, never another directory's name. */
	st(first, 0);
	fence_full();
	memset(to + 1, 0, SHMQ_DATA_PATH - 1);
	if (n && n < SHMQ_DATA_PATH) {
		memcpy(to + 1, path + 1, n - 1);
		st_release(first, path[0]);
	}
	return 0;
}

void shmq_disk_trouble_set(shmq_broker *b, int error)
{
	uint64_t before = ld(&b->d->disk_trouble);

	/* One word, so that nobody reads one trouble's errno with another's beginning. */
	if (!error)
		st(&b->d->disk_trouble, 0);
	else if ((int)(before & 0xffff) != error)
		st(&b->d->disk_trouble, (uint64_t)(realtime_ns() / 1000000000) << 16 | (uint16_t)error);
}

int shmq_disk_trouble(shmq_broker *b, char path[SHMQ_PATH_MOST])
{
	int error = (int)(ld_acquire(&b->d->disk_trouble) & 0xffff);

	path[0] = 0;
	if (!error || !shmq_supervisor_alive(b))
		return 0;
	memcpy(path, b->d->data_path, SHMQ_PATH_MOST - 1);
	path[SHMQ_PATH_MOST - 1] = 0;
	return error;
}

int shmq_supervise(shmq_broker *b, const shmq_limits *limits, int64_t until)
{
	shmq_directory_desc *d = b->d;
	int r = usable_status(b);

	if (!r && b->bell == SHMQ_NONE)
		r = bell_get(b, &b->bell);
	if (!r)
		r = registry_lock(b, until);
	if (r)
		return r;
	d->limits.msg_timeout = limits->msg_timeout_ns;
	d->limits.max_msg_timeout = limits->max_msg_timeout_ns;
	d->limits.max_req_timeout = limits->max_req_timeout_ns;
	d->limits.max_msg_size = limits->max_msg_size;
	d->limits.node_id = limits->node_id;
	d->limits.mem_queue_size = limits->mem_queue_size;
	d->limits.inflight_slots = limits->inflight_slots;
	d->limits.arena_size = limits->arena_size;
	st(&d->supervisor_pid, getpid());
	st(&d->supervisor_start_time, b->clients[b->client].start_time);
	st(&d->supervisor_since, realtime_ns());
	st(&d->heartbeat, now_ns());
	st(&d->supervisor_waiter, b->bell + 1);
	st(&d->requested, RING_REQUEST | RING_SPILLER | RING_LEFT | RING_CHANGED | RING_DEADLINE);
	st(&d->stopping, 0);
	atomic_fetch_add(&d->epoch, 1);
	st_release(&d->supervisor_client, b->client + 1);
	registry_unlock(b);
	return 0;
}

void shmq_names_written(shmq_broker *b, uint64_t replaced, uint64_t written)
{
	st_release(&b->d->names_replaced, replaced);
	st_release(&b->d->names_written, written);
}

bool shmq_broker_stopped(const shmq_broker *b)
{
	return ld(&b->d->stopping) || ld(&b->d->segment.ready) != SHMQ_READY_STATE;
}

void shmq_supervisor_stopping(shmq_broker *b)
{
	st_release(&b->d->stopping, 1);
}

void shmq_directory_close(shmq_broker *b)
{
	st_release(&b->d->segment.ready, SHMQ_CLOSED_STATE);
	for (uint32_t i = 0; i < queues_of(b); i++) {
		shmq_map *map;

		if (ld(&b->entries[i].state) == SHMQ_ENTRY_LIVE && !map_get(b, i, &map)) {
			close_queue(b, map);
			map_release(map);
		}
	}
	for (uint32_t i = 0; i < waiters_of(b); i++)
		if (ld(&b->waiters[i].owner))
			bell_ring(b, i);
}

int shmq_request_post(shmq_broker *b, enum shmq_request_kind kind, const char *topic,
                      const char *channel, int64_t until, uint32_t *ticket)
{
	shmq_request_desc *q = NULL;
	uint32_t bell = SHMQ_NONE;
	int r = usable_status(b);

	if (r)
		return r;
	if (!name_ok(topic) || (channel && *channel && !name_ok(channel)))
		return SHMQ_BAD_NAME;
	if (ld(&b->d->segment.ready) != SHMQ_READY_STATE)
		return SHMQ_GONE;
	if (ld(&b->d->stopping))
		return because(SHMQ_NOT_RUNNING, "the broker is stopping");
	(void)bell_get(b, &bell); /* without one its owner polls */
	r = registry_lock(b, until);
	if (r)
		goto fail;
	for (uint32_t i = 0; i < SHMQ_REQUESTS && !q; i++)
		if (ld(&b->requests[i].state) == SHMQ_REQUEST_FREE)
			q = &b->requests[i];
	if (!q) {
		registry_unlock(b);
		r = SHMQ_AGAIN;
		goto fail;
	}
	q->op = (uint32_t)kind;
	q->client = b->client;
	q->waiter = bell;
	q->status = 0;
	memset(q->topic, 0, sizeof(q->topic));
	memset(q->channel, 0, sizeof(q->channel));
	strcpy(q->topic, topic);
	if (channel)
		strcpy(q->channel, channel);
	SHMQ_KILLPOINT("request.filled");
	st_release(&q->state, SHMQ_REQUEST_POSTED);
	registry_unlock(b);
	*ticket = (uint32_t)(q - b->requests);
	supervisor_ring(b, RING_REQUEST);
	return 0;
fail:
	if (bell != SHMQ_NONE)
		bell_put(b, bell);
	return r;
}

int shmq_request_wait(shmq_broker *b, uint32_t ticket, int64_t deadline)
{
	shmq_request_desc *q = &b->requests[ticket];
	uint32_t bell = q->waiter;
	bool slept;
	int r = 0;

	for (;;) {
		if (shmq_broker_forked(b))
			return SHMQ_FORKED;
		if (ld_acquire(&q->state) == SHMQ_REQUEST_DONE)
			return q->status;
		if (ld(&b->d->segment.ready) != SHMQ_READY_STATE)
			return SHMQ_GONE;
		if (!shmq_supervisor_alive(b))
			return SHMQ_NOT_RUNNING;
		if (r == SHMQ_TIMEOUT || r == SHMQ_INTERRUPTED)
			return r;
		if (bell < SHMQ_WAITERS) {
			r = bell_wait(b, bell, deadline, NS_PER_S / 4, &slept);
		} else {
			struct timespec t = timespec_of(5 * NS_PER_MS);

			r = clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL) ? SHMQ_INTERRUPTED : 0;
			if (!r && now_ns() >= deadline)
				r = SHMQ_TIMEOUT;
		}
	}
}

void shmq_request_end(shmq_broker *b, uint32_t ticket)
{
	shmq_request_desc *q = &b->requests[ticket];
	uint32_t bell = q->waiter, state = ld(&q->state);

	if (shmq_broker_forked(b))
		return;
	/* POSTED -> ABANDONED unless the supervisor answers just now. */
	if (state == SHMQ_REQUEST_POSTED &&
	    atomic_compare_exchange_strong(&q->state, &state, SHMQ_REQUEST_ABANDONED)) {
		if (bell != SHMQ_NONE)
			bell_put(b, bell); /* a late ring only makes its next user look twice */
		return;
	}
	if (bell != SHMQ_NONE)
		bell_put(b, bell);
	st_release(&q->state, SHMQ_REQUEST_FREE);
}

int shmq_request_next(shmq_broker *b, int64_t until, shmq_request *out)
{
	(void)until;
	for (uint32_t i = 0; i < SHMQ_REQUESTS; i++) {
		shmq_request_desc *q = &b->requests[i];
		uint32_t state = ld_acquire(&q->state);

		if (state == SHMQ_REQUEST_ABANDONED) {
			st_release(&q->state, SHMQ_REQUEST_FREE);
		} else if (state == SHMQ_REQUEST_POSTED) {
			out->ticket = i;
			out->kind = q->op;
			out->client = q->client;
			memcpy(out->topic, q->topic, SHMQ_NAME);
			memcpy(out->channel, q->channel, SHMQ_NAME);
			out->topic[SHMQ_NAME - 1] = out->channel[SHMQ_NAME - 1] = 0;
			return 0;
		}
	}
	return SHMQ_EMPTY;
}

void shmq_request_answer(shmq_broker *b, uint32_t ticket, int status)
{
	shmq_request_desc *q = &b->requests[ticket];
	uint32_t posted = SHMQ_REQUEST_POSTED, bell = q->waiter;

	q->status = status;
	if (!atomic_compare_exchange_strong(&q->state, &posted, SHMQ_REQUEST_DONE))
		st_release(&q->state, SHMQ_REQUEST_FREE); /* abandoned meanwhile */
	else if (bell != SHMQ_NONE)
		bell_ring(b, bell);
}
