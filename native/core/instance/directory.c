/*
 * Names to topics and queues: creating, entering, taking over, deleting, pausing. Under the
 * registry lock. An entry's fields are written first, its state (or its role) last: that one store
 * makes it exist. Nothing in the directory is derived, so a death under the registry lock needs no
 * repair.
 */
#include "base/atomics.h"
#include "base/killpoint.h"
#include "base/names.h"
#include "base/status.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "queue/locking.h"
#include "queue/rebuild.h"
#include "queue/settings.h"
#include "queue/slots.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "sync/doorbell.h"
#include "sync/lock.h"

#include <string.h>

/* For readers without a lock. Returns true if all fields that were read since `before` was read
 * belong to one use of the entry: an entry that was removed and given to another name has another
 * generation. */
static bool unchanged(const _Atomic uint32_t *generation, uint32_t before)
{
	fence_acquire(); /* SYNC(entry-generation) */
	return ld(generation) == before;
}

int shmq_topic_find(shmq_broker *b, const char *name, uint32_t *topic, uint32_t *generation)
{
	uint32_t n = topics_of(b);

	for (uint32_t i = 0; i < n; i++) {
		shmq_topic_desc *t = &b->topics[i];
		uint32_t before = ld_acquire(&t->generation); /* SYNC(entry-generation) */

		/* SYNC(topic-state) */
		if (ld_acquire(&t->state) == SHMQ_ENTRY_LIVE && !strncmp(t->name, name, SHMQ_NAME)) {
			*topic = i;
			*generation = before;
			if (unchanged(&t->generation, before))
				return 0;
		}
	}
	return SHMQ_GONE;
}

int shmq_queue_find(shmq_broker *b, uint32_t topic, const char *channel, uint32_t *queue,
                    uint64_t *serial)
{
	uint32_t n = queues_of(b);

	for (uint32_t i = 0; i < n; i++) {
		shmq_entry_desc *e = &b->entries[i];
		uint32_t before = ld_acquire(&e->generation); /* SYNC(entry-generation) */
		bool is_channel;

		if (!entry_is(b, i, topic))
			continue;
		is_channel = ld_acquire(&e->role) == SHMQ_ROLE_CHANNEL; /* SYNC(entry-role) */
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
	/* A consumer of a pattern reads the generation, then the names. A death before the rings costs
	 * it 1 s. */
	atomic_fetch_add(&b->d->generation, 1);
	supervisor_ring(b, SHMQ_RING_CHANGED);
	for (uint32_t i = 0; i < waiters_of(b); i++)
		bell_names(b, i);
}

uint64_t shmq_directory_generation(const shmq_broker *b)
{
	return ld(&b->d->generation) + ((uint64_t)ld(&b->d->epoch) << 40);
}

int shmq_topic_create(shmq_broker *b, const char *name, uint64_t clock_floor,
                      const shmq_settings *settings, int64_t until, uint32_t *topic,
                      uint32_t *generation)
{
	shmq_topic_desc *t = NULL;
	uint32_t n, i;
	int r;

	error_clear();
	if (!name_ok(name))
		return SHMQ_BAD_NAME;
	r = settings ? settings_check(settings) : 0;
	if (!r)
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
		st_release(&b->d->topics_committed, more); /* SYNC(topics-committed) */
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
	topic_settings_store(t, settings ? settings : &(shmq_settings){0});
	atomic_fetch_add(&t->version, 1);
	SHMQ_KILLPOINT("create_topic.filled");
	st_release(&t->state, SHMQ_ENTRY_LIVE); /* SYNC(topic-state) */
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
			st_release(&b->d->queues_committed, more); /* SYNC(queues-committed) */
	}
	if (!r) {
		*queue = i;
		*serial = atomic_fetch_add(&b->d->next_serial, 1);
	}
	registry_unlock(b);
	return r;
}

/* Take the registry lock and the publish lock (P) of a live topic. */
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
	if (ld(&e->state) != SHMQ_ENTRY_FREE ||
	    !shmq_queue_find(b, topic, channel, &other, &other_serial)) {
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
	st_release(&e->state, SHMQ_ENTRY_LIVE); /* SYNC(entry-state) */
	SHMQ_KILLPOINT("enter_queue.live");
	atomic_fetch_add(&b->topics[topic].version, 1);
out:
	registry_and_topic_unlock(b, topic);
	return r;
}

int shmq_queue_take_over(shmq_broker *b, uint32_t topic, const char *channel,
                         const shmq_settings *settings, int64_t until, uint32_t *queue,
                         uint64_t *serial)
{
	shmq_map *map = NULL;
	shmq_entry_desc *e;
	uint32_t i;
	int r;

	error_clear();
	if (!name_ok(channel))
		return SHMQ_BAD_NAME;
	r = settings ? settings_check(settings) : 0;
	if (!r)
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
	if (settings)
		settings_store(map->q, settings);
	if (has_policy(map, SHMQ_POLICY_EXPIRY))
		expiry_note(b, map, 0);
	st(&map->q->base_pending, 1);
	SHMQ_KILLPOINT("take_over.named");
	st_release(&e->role, SHMQ_ROLE_CHANNEL); /* SYNC(entry-role) */
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
	int r = strlen(base) < SHMQ_BASE ? queue_enter(b, queue, until, &map) : SHMQ_INVALID;

	if (r)
		return r;
	memset(map->q->base, 0, SHMQ_BASE);
	strcpy(map->q->base, base);
	st(&map->q->base_pending, 0);
	queue_unlock(map);
	map_release(map);
	return 0;
}

/* Mark the queue closed and wake all its waiters: they find the queue gone. */
static void close_queue(shmq_broker *b, shmq_map *map)
{
	st_release(&map->q->segment.ready, SHMQ_CLOSED_STATE); /* SYNC(segment-ready) */
	wait_wake(b, &map->q->takers, WAKE_ALL);
	wait_wake(b, &map->q->space, WAKE_ALL);
}

/* Give the memory of a closed queue back: a process that has a view, or has not looked at the queue
 * since, keeps it mapped for long. Nobody else waits for this: only D is held. locked: it is. If
 * somebody holds it until then, or died with it, the pages stay until the last process unmaps
 * them. */
static void discard(shmq_map *map, bool locked, int64_t until)
{
	int r = locked ? 0 : lock_take(&map->q->deliver, until);

	if (r == SHMQ_LOCK_DIED)
		lock_consistent(&map->q->deliver); /* a later locker finds the queue closed */
	else if (!r)
		queue_discard(map);
	if (!r || r == SHMQ_LOCK_DIED)
		queue_unlock(map);
}

/* Returns true if the queue has a consumer. A consumer enters its session under D, so one that
 * comes later finds the queue closed. */
static bool has_session(shmq_map *map)
{
	uint32_t n = sessions_of(map);

	for (uint32_t i = 0; i < n; i++)
		if (ld(&map->sessions[i].client))
			return true;
	return false;
}

/* How a queue is removed. */
typedef struct removal {
	bool was_closed; /* it cannot be mapped */
	bool idle;       /* only if it has no consumer */
	bool erase;      /* its entry stays until its files are gone */
} removal;

static int queue_remove(shmq_broker *b, uint32_t queue, uint64_t serial, removal how, int64_t until,
                        bool *removed)
{
	shmq_entry_desc *e = &b->entries[queue];
	shmq_map *map = NULL;
	bool deliver = false;
	uint32_t topic;
	int r;

	*removed = false;
	if (queue >= queues_of(b) || ld(&e->state) == SHMQ_ENTRY_FREE || e->serial != serial)
		return SHMQ_GONE;
	topic = e->topic;
	r = how.was_closed ? registry_lock(b, until) : map_get_serial(b, queue, serial, &map);
	if (r)
		return r;
	if (how.was_closed) {                           /* the repair of its topic must not meet it */
		st_release(&e->state, SHMQ_ENTRY_DELETING); /* SYNC(entry-state) */
		registry_unlock(b);
	}
	r = registry_and_topic(b, topic, until);
	if (r)
		goto out;
	if (how.idle) {
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
	/* SYNC(entry-state) */
	st_release(&e->state, how.erase ? SHMQ_ENTRY_ERASING : SHMQ_ENTRY_DELETING);
	atomic_fetch_add(&b->topics[topic].version, 1);
	SHMQ_KILLPOINT("remove_queue.deleting");
	if (map)
		close_queue(b, map);
	SHMQ_KILLPOINT("remove_queue.closed");
	atomic_fetch_add(&e->generation, 1); /* SYNC(entry-generation) */
	st(&b->next_deadline[queue], INT64_MAX);
	st(&b->next_due[queue], INT64_MAX);
	if (!how.erase)
		st_release(&e->state, SHMQ_ENTRY_FREE); /* SYNC(entry-state) */
	registry_and_topic_unlock(b, topic);
	shmq_broker_unmap(b, queue, serial);
	if (map)
		discard(map, deliver, until);
	*removed = true;
out:
	map_release(map);
	return r;
}

int shmq_queue_remove(shmq_broker *b, uint32_t queue, uint64_t serial, bool was_closed,
                      int64_t until)
{
	bool removed;

	return queue_remove(b, queue, serial, (removal){.was_closed = was_closed}, until, &removed);
}

int shmq_queue_erase(shmq_broker *b, uint32_t queue, uint64_t serial, bool idle, int64_t until,
                     bool *erased)
{
	return queue_remove(b, queue, serial, (removal){.idle = idle, .erase = true}, until, erased);
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
		atomic_fetch_add(&t->generation, 1); /* SYNC(entry-generation) */
		atomic_fetch_add(&t->version, 1);
		SHMQ_KILLPOINT("remove_topic.generation");
		st_release(&t->state, SHMQ_ENTRY_FREE); /* SYNC(topic-state) */
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
			spiller_note(b, backlog); /* it may have to move */
	}
	registry_and_topic_unlock(b, topic);
	supervisor_ring(b, SHMQ_RING_SPILLER);
	return r;
}

int shmq_channel_pause(shmq_broker *b, uint32_t queue, uint64_t serial, bool paused, int64_t until)
{
	shmq_map *map;
	int r = queue_enter_serial(b, queue, serial, until, &map);

	if (r)
		return r;
	st(&map->q->paused, paused);
	queue_unlock(map);
	wait_wake(b, &map->q->takers, WAKE_ALL);
	changed(b);
	map_release(map);
	return 0;
}

/* As both_enter, for a client that names the queue by its serial, too. */
static int both_enter_serial(shmq_broker *b, uint32_t queue, uint64_t serial, int64_t until,
                             shmq_map **out)
{
	int r = usable_status(b);

	if (!r)
		r = both_enter(b, queue, until, out);
	if (!r && (*out)->serial != serial) {
		both_unlock(b, *out);
		map_release(*out);
		r = SHMQ_GONE;
	}
	return r;
}

/* Returns 0 if the topic may have these settings: one that holds dead letters can only be sealed. */
static int settings_allowed(const shmq_topic_desc *t, const shmq_settings *settings)
{
	if (!(t->flags & SHMQ_FLAG_DEAD) || settings_are_none(settings))
		return 0;
	return fail(
			SHMQ_INVALID,
			"topic '%.*s' holds dead letters of other channels, so it keeps all it gets: give its "
			"channels no settings",
			SHMQ_NAME - 1, t->name);
}

/* Returns 0 if the queue can have these limits: memory has to hold what may wait, and no limit may be
 * below what waits already, unless the surplus is dropped. Both locks are held. */
static int settings_fit(shmq_map *map, const shmq_settings *s)
{
	uint64_t waiting = waiting_count(map), budget = ready_budget(map);

	if (s->max_messages > budget && s->overflow != SHMQ_OVERFLOW_DISK)
		return fail(SHMQ_INVALID,
		            "max_messages %llu; memory holds %llu: lower it, or start the broker with a "
		            "higher mem_queue_size",
		            (unsigned long long)s->max_messages, (unsigned long long)budget);
	if (s->max_messages && s->max_messages < waiting && s->overflow != SHMQ_OVERFLOW_DROP_OLDEST)
		return fail(SHMQ_INVALID,
		            "max_messages %llu; %llu messages wait already: let them be consumed first, "
		            "empty the channel, or set overflow=drop-oldest, which drops the oldest",
		            (unsigned long long)s->max_messages, (unsigned long long)waiting);
	return 0;
}

/* Returns 0 if these settings hold still, or nobody asks; SHMQ_OVERTAKEN. */
static int settings_still(const shmq_settings *was, const shmq_settings *now)
{
	return !was || settings_equal(was, now) ? 0 : SHMQ_OVERTAKEN;
}

/* Store the settings if the queue can have them. Both locks are held. */
static int settings_change(shmq_broker *b, shmq_map *map, const shmq_settings *settings)
{
	bool counted = has_policy(map, SHMQ_POLICY_BYTES), sealed = has_policy(map, SHMQ_POLICY_SEALED);
	int r = settings_allowed(topic_of(b, map), settings);

	if (!r)
		r = settings_fit(map, settings);
	if (r)
		return r;
	settings_store(map->q, settings);
	if (sealed != has_policy(map, SHMQ_POLICY_SEALED))
		atomic_fetch_add(&topic_of(b, map)->version, 1); /* as the producers' lists */
	if (!counted && has_policy(map, SHMQ_POLICY_BYTES))
		r = queue_rebuild(b, map, false); /* which counts the bytes */
	if (!r && has_policy(map, SHMQ_POLICY_EXPIRY))
		expiry_note(b, map, 0);
	return r;
}

/* Have everybody look at the new settings; nothing is locked. */
static void settings_announce(shmq_broker *b, shmq_map *map)
{
	wait_wake(b, &map->q->takers, WAKE_ALL);
	wait_wake(b, &map->q->space, WAKE_ALL);
	spiller_ring(b, map->index);
}

int shmq_queue_configure(shmq_broker *b, uint32_t queue, uint64_t serial, const shmq_settings *was,
                         const shmq_settings *settings, int64_t until)
{
	shmq_settings now;
	shmq_map *map;
	int r;

	error_clear();
	r = settings_check(settings);
	if (!r)
		r = both_enter_serial(b, queue, serial, until, &map);
	if (r)
		return r;
	now = settings_load(map->q);
	r = settings_still(was, &now);
	if (!r)
		r = settings_change(b, map, settings);
	both_unlock(b, map);
	if (!r) {
		settings_announce(b, map);
		changed(b);
	}
	map_release(map);
	return r;
}

int shmq_queue_settings(shmq_broker *b, uint32_t queue, uint64_t serial, int64_t until,
                        shmq_settings *out)
{
	shmq_map *map;
	int r = queue_enter_serial(b, queue, serial, until, &map);

	if (r)
		return r;
	*out = settings_load(map->q);
	queue_unlock(map);
	map_release(map);
	return 0;
}

/* Lock R and the topic's P for a client that names the topic by its generation, too. */
static int topic_enter(shmq_broker *b, uint32_t topic, uint32_t generation, int64_t until)
{
	int r = usable_status(b);

	if (!r && topic >= topics_of(b))
		r = SHMQ_GONE;
	if (!r)
		r = registry_and_topic(b, topic, until);
	if (!r && ld(&b->topics[topic].generation) != generation) {
		topic_unlock(&b->topics[topic]);
		registry_unlock(b);
		r = SHMQ_GONE;
	}
	return r;
}

/* Give the topic's backlog, if there is one, these settings. R and P are held. */
static int backlog_configure(shmq_broker *b, uint32_t topic, const shmq_settings *settings,
                             int64_t until, shmq_map **map)
{
	uint64_t serial;
	uint32_t queue;
	int r;

	if (shmq_queue_find(b, topic, NULL, &queue, &serial))
		return 0;
	r = map_get_serial(b, queue, serial, map);
	if (r)
		return r;
	client_note_queue(b, queue);
	r = queue_lock_under(b, *map, until);
	if (r)
		return r;
	r = settings_change(b, *map, settings);
	queue_unlock(*map);
	return r;
}

int shmq_topic_configure(shmq_broker *b, uint32_t topic, uint32_t generation,
                         const shmq_settings *was, const shmq_settings *settings, int64_t until)
{
	shmq_map *backlog = NULL;
	shmq_settings now;
	int r;

	error_clear();
	r = settings_check(settings);
	if (!r)
		r = topic_enter(b, topic, generation, until);
	if (r)
		return r;
	now = topic_settings_load(&b->topics[topic]);
	r = settings_still(was, &now);
	if (!r) /* before the topic's own, because it may refuse a limit */
		r = backlog_configure(b, topic, settings, until, &backlog);
	if (!r) {
		topic_settings_store(&b->topics[topic], settings);
		atomic_fetch_add(&b->topics[topic].version, 1); /* the producers' lists depend on it */
	}
	registry_and_topic_unlock(b, topic);
	if (!r && backlog)
		settings_announce(b, backlog);
	map_release(backlog);
	return r;
}

int shmq_topic_settings(shmq_broker *b, uint32_t topic, uint32_t generation, int64_t until,
                        shmq_settings *out)
{
	int r = topic_enter(b, topic, generation, until);

	if (r)
		return r;
	*out = topic_settings_load(&b->topics[topic]);
	topic_unlock(&b->topics[topic]);
	registry_unlock(b);
	return 0;
}

void shmq_directory_close(shmq_broker *b)
{
	st_release(&b->d->segment.ready, SHMQ_CLOSED_STATE); /* SYNC(segment-ready) */
	for (uint32_t i = 0; i < queues_of(b); i++) {
		shmq_map *map;

		if (ld(&b->entries[i].state) == SHMQ_ENTRY_LIVE && !map_get(b, i, &map)) {
			close_queue(b, map);
			map_release(map);
		}
	}
	for (uint32_t i = 0; i < waiters_of(b); i++)
		if (ld(&b->waiters[i].owner))
			bell_alarm(b, i);
}
