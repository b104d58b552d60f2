/* The supervisor's words in the directory, and how clients learn whether it lives. */
#include "base/atomics.h"
#include "base/clock.h"
#include "base/process.h"
#include "instance/create.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "queue/locking.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "sync/doorbell.h"
#include "sync/lock.h"

#include <string.h>
#include <unistd.h>

bool shmq_supervisor_alive(shmq_broker *b)
{
	uint32_t client = ld_acquire(&b->d->supervisor_client); /* SYNC(supervisor-client) */
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
	/* The process may live although the thread that held `life` has ended. */
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
	/* The first byte last: a death on the way leaves an empty path, never a part of another one. */
	st(first, 0);
	fence_full(); /* SYNC(data-path) */
	memset(to + 1, 0, SHMQ_DATA_PATH - 1);
	if (n && n < SHMQ_DATA_PATH) {
		memcpy(to + 1, path + 1, n - 1);
		st_release(first, path[0]); /* SYNC(data-path) */
	}
	return 0;
}

void shmq_disk_trouble_set(shmq_broker *b, int error)
{
	uint64_t before = ld(&b->d->disk_trouble);

	/* One word, so that no reader combines one trouble's errno with another's time. */
	if (!error)
		st(&b->d->disk_trouble, 0);
	else if ((int)(before & 0xffff) != error)
		st(&b->d->disk_trouble, (uint64_t)(realtime_ns() / 1000000000) << 16 | (uint16_t)error);
}

int shmq_disk_trouble(shmq_broker *b, char path[SHMQ_PATH_MOST])
{
	int error = (int)(ld(&b->d->disk_trouble) & 0xffff);

	path[0] = 0;
	if (!error || !shmq_supervisor_alive(b))
		return 0;
	memcpy(path, b->d->data_path, SHMQ_PATH_MOST - 1); /* SYNC(data-path) */
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
	limits_store(&d->limits, limits);
	st(&d->supervisor_pid, getpid());
	st(&d->supervisor_start_time, b->clients[b->client].start_time);
	st(&d->supervisor_since, realtime_ns());
	st(&d->heartbeat, now_ns());
	st(&d->supervisor_waiter, b->bell + 1);
	st(&d->requested, SHMQ_RING_ALL);
	st(&d->stopping, 0);
	atomic_fetch_add(&d->epoch, 1);
	st_release(&d->supervisor_client, b->client + 1); /* SYNC(supervisor-client) */
	registry_unlock(b);
	return 0;
}

void shmq_names_written(shmq_broker *b, uint64_t replaced, uint64_t written)
{
	st_release(&b->d->names_replaced, replaced); /* SYNC(names-written) */
	st_release(&b->d->names_written, written);   /* SYNC(names-written) */
}

bool shmq_broker_stopped(const shmq_broker *b)
{
	return ld(&b->d->stopping) || ld(&b->d->segment.ready) != SHMQ_READY_STATE;
}

void shmq_supervisor_stopping(shmq_broker *b)
{
	st_release(&b->d->stopping, 1); /* SYNC(stopping) */
}

int shmq_supervisor_wait(shmq_broker *b, int64_t deadline, uint32_t *why)
{
	bool slept;
	int r;

	if (b->bell == SHMQ_NONE)
		return SHMQ_INVALID;
	st(&b->d->heartbeat, now_ns());
	*why = 0;
	r = ld(&b->d->requested) ? 0 : bell_wait(b, b->bell, deadline, NS_PER_S, &slept);
	*why = atomic_exchange(&b->d->requested, 0);
	st(&b->d->heartbeat, now_ns());
	return r == SHMQ_TIMEOUT ? 0 : r;
}
