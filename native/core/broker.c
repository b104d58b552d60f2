/*
 * Attachment: one process's mapping of the directory, its client entry, its table of mapped queues.
 *
 * death between taking an entry (ATTACHING) and LIVE: the registry lock dies with it; who gets the
 * registry lock next and finds ATTACHING knows that its maker is dead.
 */
#include "internal.h"
#include "owner.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Atomic uint32_t fork_count;

static void in_child(void)
{
	atomic_fetch_add(&fork_count, 1);
}

__attribute__((constructor)) static void watch_forks(void)
{
	pthread_atfork(NULL, NULL, in_child);
}

uint32_t shmq_fork_generation(void)
{
	return ld(&fork_count);
}

int64_t shmq_now(void)
{
	return now_ns();
}

int64_t shmq_realtime(void)
{
	return realtime_ns();
}

bool shmq_broker_forked(const shmq_broker *b)
{
	return b->fork_generation != ld(&fork_count);
}

bool usable(const shmq_broker *b)
{
	return b->attached && !shmq_broker_forked(b);
}

int usable_status(const shmq_broker *b)
{
	return shmq_broker_forked(b) ? SHMQ_FORKED : b->attached ? 0 : SHMQ_CLOSED;
}

uint32_t shmq_broker_client(const shmq_broker *b)
{
	return b->client;
}

/* Pages and life locks of client entries up to `n`, once and for all. Registry held. */
static int clients_commit(shmq_broker *b, uint32_t n)
{
	uint32_t have = clients_of(b);
	int r = directory_whole(b);

	if (n <= have || r)
		return r;
	n = n + 15 < SHMQ_CLIENTS ? n + 15 : SHMQ_CLIENTS;
	r = segment_commit(b->base, (uint64_t)((uint8_t *)&b->clients[have] - b->base),
	                   (n - have) * sizeof(shmq_client_desc));
	while (!r && have < n) {
		r = lock_init(&b->clients[have].life);
		if (!r)
			st_release(&b->d->clients_committed, ++have);
	}
	return r;
}

/* A free entry whose life lock nobody holds (a thread that outlives its broker may), locked. */
static int client_claim(shmq_broker *b, uint32_t *index)
{
	for (uint32_t i = 0; i < SHMQ_CLIENTS; i++) {
		int r = clients_commit(b, i + 1);

		if (r)
			return r;
		if (ld(&b->clients[i].state) != SHMQ_CLIENT_FREE)
			continue;
		r = lock_take(&b->clients[i].life, 0);
		if (r == SHMQ_LOCK_DIED)
			lock_consistent(&b->clients[i].life);
		else if (r)
			continue;
		*index = i;
		return 0;
	}
	return SHMQ_TOO_MANY_CLIENTS;
}

int shmq_broker_attach(shmq_broker *b, enum shmq_kind kind, int64_t until)
{
	process_identity self = process_identify(getpid());
	shmq_client_desc *c;
	int r;

	if (shmq_broker_forked(b))
		return SHMQ_FORKED;
	if (b->attached)
		return 0;
	if (b->d->pid_namespace != pid_namespace_inode())
		return because(SHMQ_INVALID, "this process is in another PID namespace than the broker: "
		                             "share it (docker run --pid=... --ipc=...)");
	r = registry_lock(b, until);
	if (r)
		return r;
	if (ld(&b->d->segment.ready) != SHMQ_READY_STATE)
		r = SHMQ_GONE;
	else if (ld(&b->d->stopping) && kind != SHMQ_AS_SUPERVISOR)
		r = because(SHMQ_NOT_RUNNING, "the broker is stopping");
	else
		r = client_claim(b, &b->client);
	if (r)
		goto out;
	c = &b->clients[b->client];
	c->pid = getpid();
	c->kind = (uint32_t)kind;
	c->start_time = self.start_time;
	c->program = self.program;
	c->pid_namespace = b->d->pid_namespace;
	c->attached_at = realtime_ns();
	c->uid = geteuid();
	st(&c->orphan, 0);
	SHMQ_KILLPOINT("attach.filled");
	st_release(&c->state, SHMQ_CLIENT_LIVE);
	SHMQ_KILLPOINT("attach.live");
	b->client_generation = ld(&c->generation);
	b->attached = true;
out:
	registry_unlock(b);
	return r;
}

int shmq_broker_detach(shmq_broker *b, int64_t until)
{
	shmq_client_desc *c = &b->clients[b->client];
	uint32_t returned;
	int r;

	if (!b->attached || shmq_broker_forked(b)) {
		b->attached = false;
		return 0;
	}
	r = shmq_reap(b, b->client, b->client_generation, until, &returned);
	if (r)
		return r;
	b->attached = false;
	b->bell = SHMQ_NONE;
	lock_drop(&c->life); /* fails harmlessly in a thread other than the one that attached */
	supervisor_ring(b, RING_LEFT);
	return 0;
}

void broker_hold(shmq_broker *b)
{
	atomic_fetch_add(&b->references, 1);
}

void broker_release(shmq_broker *b)
{
	if (atomic_fetch_sub(&b->references, 1) != 1)
		return;
	for (uint32_t i = 0; i < SHMQ_QUEUES; i++)
		if (ld(&b->maps[i]))
			map_release(ld(&b->maps[i]));
	segment_unmap(b->base, b->size);
	pthread_mutex_destroy(&b->mutex);
	free(b);
}

void shmq_broker_close(shmq_broker *b)
{
	b->attached = false;
	broker_release(b);
}

/* ---- mapped queues ---- */

static _Thread_local struct {
	uint32_t queue;
	uint64_t serial;
} missing;

void shmq_broker_missing(const shmq_broker *b, uint32_t *queue, uint64_t *serial)
{
	(void)b;
	*queue = missing.queue;
	*serial = missing.serial;
}

int map_get_serial(shmq_broker *b, uint32_t index, uint64_t serial, shmq_map **out)
{
	shmq_map *map;
	int r = 0;

	if (index >= SHMQ_QUEUES)
		return SHMQ_INVALID;
	pthread_mutex_lock(&b->mutex);
	map = ld(&b->maps[index]);
	if (map && map->serial == serial) {
		map_hold(map);
		*out = map;
	} else {
		missing.queue = index;
		missing.serial = serial;
		r = SHMQ_NEED_MAP;
	}
	pthread_mutex_unlock(&b->mutex);
	return r;
}

int map_get(shmq_broker *b, uint32_t index, shmq_map **out)
{
	if (index >= queues_of(b) ||
	    ld_acquire(&b->entries[index].state) == SHMQ_ENTRY_FREE)
		return SHMQ_GONE;
	return map_get_serial(b, index, b->entries[index].serial, out);
}

int shmq_broker_map(shmq_broker *b, uint32_t queue, uint64_t serial, int fd)
{
	shmq_map *map, *old;
	int r;

	if (queue >= SHMQ_QUEUES)
		return SHMQ_INVALID;
	r = map_open(fd, queue, serial, b->d->segment.instance, &map);
	if (r)
		return r;
	pthread_mutex_lock(&b->mutex);
	old = ld(&b->maps[queue]);
	st_release(&b->maps[queue], map);
	pthread_mutex_unlock(&b->mutex);
	map_release(old);
	return 0;
}

void shmq_broker_unmap(shmq_broker *b, uint32_t queue, uint64_t serial)
{
	shmq_map *old = NULL;

	if (queue >= SHMQ_QUEUES)
		return;
	pthread_mutex_lock(&b->mutex);
	if (ld(&b->maps[queue]) && ld(&b->maps[queue])->serial == serial) {
		old = ld(&b->maps[queue]);
		st_release(&b->maps[queue], (shmq_map *)NULL);
	}
	pthread_mutex_unlock(&b->mutex);
	map_release(old);
}

void map_put(shmq_broker *b, shmq_map *map)
{
	if (map && ld(&map->q->segment.ready) == SHMQ_CLOSED_STATE && !shmq_broker_forked(b))
		shmq_broker_unmap(b, map->index, map->serial);
	map_release(map);
}

void touch(shmq_broker *b, uint32_t index)
{
	_Atomic uint64_t *word = &b->clients[b->client].touched[index / 64];
	uint64_t bit = UINT64_C(1) << index % 64;

	if (!(ld(word) & bit))
		atomic_fetch_or(word, bit);
}

struct view {
	shmq_broker *broker;
	shmq_map *map;
};

int shmq_segment_view(shmq_broker *b, uint32_t queue, const void **base, uint64_t *length,
                      void **reference)
{
	struct view *v = calloc(1, sizeof(*v));
	int r = v ? 0 : SHMQ_NO_MEMORY;

	if (!r && queue != SHMQ_AS_DIRECTORY)
		r = map_get(b, queue, &v->map);
	if (r) {
		free(v);
		return r;
	}
	broker_hold(b);
	v->broker = b;
	*base = v->map ? v->map->base : b->base;
	*length = v->map ? v->map->size : b->size;
	*reference = v;
	return 0;
}

void shmq_segment_release(void *reference)
{
	struct view *v = reference;

	map_release(v->map);
	broker_release(v->broker);
	free(v);
}
