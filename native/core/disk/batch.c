#include "disk/batch.h"

#include "base/atomics.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "queue/locking.h"
#include "queue/rebuild.h"
#include "shmq.h"
#include "shmq_supervisor.h"

int batch_begin(shmq_broker *b, uint32_t queue, const batch_wish *wish, int64_t until,
                int (*mark)(shmq_broker *b, shmq_map *map, const batch_wish *wish, shmq_spill *out),
                shmq_spill *out)
{
	out->queue = queue;
	for (bool repaired = false;; repaired = true) {
		shmq_map *map;
		bool broken;
		int r = queue_enter(b, queue, until, &map);

		if (r)
			return r;
		out->count = 0;
		out->bytes = 0;
		r = mark(b, map, wish, out);
		broken = !out->count && ld(&map->q->dirty);
		queue_unlock(map);
		if (broken && repaired)
			r = queue_corrupt(map);
		map_release(map);
		if (!broken || repaired)
			return r;
	}
}

int batch_lock(shmq_broker *b, shmq_map *map, const shmq_spill *s, int64_t until,
               bool (*whole)(shmq_map *map, const shmq_spill *s), bool *commit)
{
	if (*commit) {
		int r = queue_lock(b, map, until);

		if (r || whole(map, s))
			return r;
		queue_unlock(map);
		*commit = false;
	}
	return both_lock(b, map, until);
}
