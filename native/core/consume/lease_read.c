/*
 * Reading a lease. A reader takes no lock: it copies slots and bodies, then checks that the lease's
 * word is still HELD with the same id. Slots and bodies of a lease do not change before that word.
 */
#include "base/atomics.h"
#include "base/bounds.h"
#include "base/status.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "queue/lease.h"
#include "shmq.h"

#include <string.h>

static int reading(shmq_broker *b, uint32_t queue, uint64_t serial, uint64_t id, shmq_map **map,
                   shmq_lease_desc **e)
{
	int r = usable_status(b);

	if (!r)
		r = map_get_serial(b, queue, serial, map);
	if (r)
		return r;
	*e = ld(&(*map)->q->segment.ready) == SHMQ_READY_STATE ? lease_entry(*map, id) : NULL;
	if (!*e) {
		map_release(*map);
		return SHMQ_LEASE_LOST;
	}
	fence_acquire(); /* SYNC(lease-state) SYNC(lease-on-disk) */
	return 0;
}

/* Returns 0 if everything read so far belongs to this lease, else SHMQ_LEASE_LOST. */
static int still(const shmq_lease_desc *e, uint64_t id)
{
	fence_acquire(); /* SYNC(lease-state) SYNC(lease-on-disk) */
	return ld(&e->word) == WORD(SHMQ_LEASE_HELD, id) ? 0 : SHMQ_LEASE_LOST;
}

int shmq_lease_open(shmq_broker *b, uint32_t queue, uint64_t serial, uint64_t id, uint32_t part,
                    shmq_lease_cursor *out)
{
	shmq_lease_desc *e;
	shmq_map *map;
	uint32_t count, parts;
	const shmq_run_desc *run;
	int r = reading(b, queue, serial, id, &map, &e);

	if (r)
		return r;
	count = e->count;
	parts = e->parts;
	run = &map->q->run;
	if (part >= parts || parts > SHMQ_LEASE_PARTS) {
		r = still(e, id);
		if (!r)
			r = fail(SHMQ_INVALID, "lease %llu has %u parts", (unsigned long long)id, parts);
	} else {
		*out = (shmq_lease_cursor){.queue = queue,
		                           .part = part,
		                           .slot = e->first[part],
		                           .left = (uint32_t)((uint64_t)(part + 1) * count / parts -
		                                              (uint64_t)part * count / parts),
		                           .serial = serial,
		                           .id = id};
		if (e->on_disk) {
			out->from = run->at[part];
			out->to = part + 1 < parts ? run->at[part + 1] : run->to;
		}
		r = still(e, id);
		if (!r && e->on_disk && ld(&run->lease) != id)
			r = SHMQ_LEASE_LOST; /* the queue was emptied */
	}
	map_release(map);
	return r;
}

/* Find a slot's body. Returns false if it is not inside the arena. The caller checks afterwards
 * that the lease is still held, so that the body is the lease's. */
static bool body_at(shmq_map *map, uint32_t slot, const shmq_slot_desc **s, span *at)
{
	uint64_t end = arena_of(map);

	if (!TRUST_CHECK(slot < slots_of(map)))
		return false;
	*s = &map->slots[slot];
	at->length = once((*s)->length);
	at->body = once((*s)->body);
	return TRUST_CHECK(at->body <= end && at->length <= end - at->body) && span_separate(*s, at);
}

int shmq_lease_measure(shmq_broker *b, const shmq_lease_cursor *c, uint32_t rows, uint64_t bytes,
                       uint32_t *count, uint64_t *size)
{
	const shmq_slot_desc *s;
	shmq_lease_desc *e;
	shmq_map *map;
	uint32_t slot = c->slot;
	span body;
	int r = reading(b, c->queue, c->serial, c->id, &map, &e);

	if (r)
		return r;
	*count = 0;
	*size = 0;
	if (bytes > INT32_MAX)
		bytes = INT32_MAX;
	for (; *count < c->left && *count < rows && body_at(map, slot, &s, &body); slot = s->next) {
		if (*count && *size + body.length > bytes)
			break;
		slots_ahead(map, slot);
		bodies_ahead(map, s);
		*size += body.length;
		++*count;
	}
	r = still(e, c->id);
	map_release(map);
	return r;
}

int shmq_lease_copy(shmq_broker *b, shmq_lease_cursor *c, uint32_t count, uint64_t size,
                    const shmq_columns *to)
{
	const shmq_slot_desc *s;
	shmq_lease_desc *e;
	shmq_map *map;
	uint32_t slot = c->slot;
	uint64_t at = 0;
	span body;
	int r = reading(b, c->queue, c->serial, c->id, &map, &e);

	if (r)
		return r;
	for (uint32_t i = 0; i < count; i++) {
		if (!body_at(map, slot, &s, &body) || body.length > size - at) {
			r = SHMQ_LEASE_LOST;
			goto out;
		}
		to->ids[i] = s->id;
		to->timestamps[i] = s->timestamp;
		to->attempts[i] = (uint16_t)(s->attempts + 1);
		to->offsets[i] = (int32_t)at;
		memcpy(to->data + at, map->arena + body.body, body.length);
		at += body.length;
		slot = s->next;
	}
	to->offsets[count] = (int32_t)at;
	r = still(e, c->id);
	if (!r && at != size)
		r = SHMQ_CORRUPT;
	if (!r) {
		c->slot = slot;
		c->left -= count;
	}
out:
	map_release(map);
	return r;
}

int shmq_lease_properties(shmq_broker *b, const shmq_lease_cursor *c, uint32_t count,
                          uint64_t *size, const shmq_blocks *to)
{
	const shmq_slot_desc *s;
	shmq_lease_desc *e;
	shmq_map *map;
	uint32_t slot = c->slot;
	uint64_t at = 0, most = to ? *size : INT32_MAX;
	span body;
	int r = reading(b, c->queue, c->serial, c->id, &map, &e);

	if (r)
		return r;
	for (uint32_t i = 0; i < count && !r; i++, slot = s->next) {
		if (!body_at(map, slot, &s, &body)) {
			r = SHMQ_LEASE_LOST;
			break;
		}
		if (body.properties > most - at) /* with `to`: it was overwritten since it was measured */
			r = to ? SHMQ_CORRUPT : SHMQ_TOO_BIG;
		if (!r && to) {
			to->offsets[i] = (int32_t)at;
			memcpy(to->blocks + at, map->arena + body.body - body.properties, body.properties);
		}
		at += body.properties;
	}
	if (!r && to)
		to->offsets[count] = (int32_t)at;
	if (still(e, c->id))
		r = SHMQ_LEASE_LOST;
	if (!r)
		*size = at;
	map_release(map);
	return r;
}
