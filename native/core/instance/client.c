/*
 * Attaching and detaching: taking a client entry of the directory and giving it back.
 *
 * death between taking an entry and LIVE: the entry is still FREE, and the registry lock, which
 * dies with its holder, is repaired by its next locker.
 */
#include "base/atomics.h"
#include "base/bounds.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "base/libc.h"
#include "base/process.h"
#include "base/status.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "queue/locking.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "sync/doorbell.h"
#include "sync/lock.h"

#include <unistd.h>

/* Allocate the pages and the life locks of the first `n` client entries, if they do not exist yet.
 * The registry lock is held. */
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
			st_release(&b->d->clients_committed, ++have); /* SYNC(clients-committed) */
	}
	return r;
}

/* Find a free entry and take its life lock. A thread that outlives its broker may still hold the
 * life lock of a free entry; such an entry is skipped. */
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
		/* Before LIVE and the fields, so that who reads the generation first, then LIVE, then the
		 * fields, and then the same generation, has read of one client. */
		atomic_fetch_add(&b->clients[i].generation, 1); /* SYNC(client-generation) */
		SHMQ_KILLPOINT("attach.generation");
		*index = i;
		return 0;
	}
	return SHMQ_TOO_MANY_CLIENTS;
}

int shmq_broker_attach(shmq_broker *b, enum shmq_kind kind, int64_t until)
{
	process_identity self = process_identify(getpid());
	uint64_t ours = pid_namespace_inode();
	shmq_client_desc *c;
	int r;

	if (shmq_broker_forked(b))
		return SHMQ_FORKED;
	if (b->attached)
		return 0;
	if (!ours)
		return fail(SHMQ_FOREIGN, "/proc cannot be read (mount it), so nothing says that it is");
	if (once(b->d->pid_namespace) != ours)
		return fail(SHMQ_FOREIGN, "pids and thread ids there mean other processes here, so a live "
		                          "holder of a lock could be taken for a dead one");
	r = registry_lock(b, until);
	if (r)
		return r;
	if (ld(&b->d->segment.ready) != SHMQ_READY_STATE) /* SYNC(segment-ready) */
		r = SHMQ_GONE;
	else if (ld(&b->d->stopping) && kind != SHMQ_AS_SUPERVISOR) /* SYNC(stopping) */
		r = fail(SHMQ_NOT_RUNNING, "the broker is stopping");
	else
		r = client_claim(b, &b->client);
	if (r)
		goto out;
	c = &b->clients[b->client];
	c->pid = getpid();
	c->kind = (uint32_t)kind;
	c->start_time = self.start_time;
	c->program = self.program;
	c->pid_namespace = ours;
	c->attached_at = realtime_ns();
	c->uid = geteuid();
	st(&c->orphan, 0);
	SHMQ_KILLPOINT("attach.filled");
	st_release(&c->state, SHMQ_CLIENT_LIVE); /* SYNC(client-state) */
	SHMQ_KILLPOINT("attach.live");
	b->client_generation = ld(&c->generation);
	b->attached = b->life = true;
	b->life_tid = thread_id();
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
	b->life = !lock_drop(&c->life); /* it stays held by another thread that attached */
	supervisor_ring(b, SHMQ_RING_LEFT);
	return 0;
}
