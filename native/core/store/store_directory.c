/*
 * Names to results stores: the directory's table of stores. Under the registry lock; an entry's
 * fields are written first, its state last. death: it is entered or it is not.
 */
#include "base/atomics.h"
#include "base/killpoint.h"
#include "base/names.h"
#include "base/status.h"
#include "memory/mapping.h"
#include "memory/store_handle.h"
#include "queue/locking.h"

#include <string.h>

int shmq_store_find(shmq_broker *b, const char *name, uint32_t *store, uint64_t *serial)
{
	for (uint32_t i = 0; i < SHMQ_STORES; i++) {
		shmq_store_entry_desc *e = &b->stores[i];
		uint32_t before = ld_acquire(&e->generation); /* SYNC(store-entry) */

		/* SYNC(store-entry) */
		if (ld_acquire(&e->state) != SHMQ_ENTRY_LIVE || strncmp(e->name, name, SHMQ_NAME) != 0)
			continue;
		*store = i;
		*serial = e->serial;
		fence_acquire(); /* SYNC(store-entry) */
		if (ld(&e->generation) == before)
			return 0;
	}
	return SHMQ_GONE;
}

int shmq_store_reserve(shmq_broker *b, int64_t until, uint32_t *store, uint64_t *serial)
{
	uint32_t i = 0;
	int r = registry_lock(b, until);

	if (r)
		return r;
	while (i < SHMQ_STORES && ld(&b->stores[i].state) != SHMQ_ENTRY_FREE)
		i++;
	if (i == SHMQ_STORES) {
		r = fail(SHMQ_TABLE_FULL,
		         "an instance has at most %d results stores; delete one that is not needed",
		         SHMQ_STORES);
	} else {
		*store = i;
		*serial = atomic_fetch_add(&b->d->next_serial, 1);
	}
	registry_unlock(b);
	return r;
}

int shmq_store_enter(shmq_broker *b, const shmq_store_spec *spec, int64_t until)
{
	shmq_store_entry_desc *e;
	uint64_t serial;
	uint32_t other;
	int r;

	if (!name_ok(spec->name))
		return SHMQ_BAD_NAME;
	if (spec->store >= SHMQ_STORES)
		return SHMQ_INVALID;
	r = registry_lock(b, until);
	if (r)
		return r;
	e = &b->stores[spec->store];
	if (ld(&e->state) != SHMQ_ENTRY_FREE || !shmq_store_find(b, spec->name, &other, &serial)) {
		registry_unlock(b);
		return fail(SHMQ_INVALID, "there is a results store of this name, or its place is taken");
	}
	memset(e->name, 0, sizeof(e->name));
	strcpy(e->name, spec->name);
	e->serial = spec->serial;
	e->max_keys = spec->max_keys;
	e->max_bytes = spec->max_bytes;
	e->flags = shmq_name_ephemeral(spec->name, strlen(spec->name)) ? SHMQ_FLAG_EPHEMERAL : 0;
	SHMQ_KILLPOINT("enter_store.filled");
	st_release(&e->state, SHMQ_ENTRY_LIVE); /* SYNC(store-entry) */
	registry_unlock(b);
	return 0;
}

int shmq_store_remove(shmq_broker *b, uint32_t store, uint64_t serial, int64_t until)
{
	shmq_store_entry_desc *e;
	int r;

	if (store >= SHMQ_STORES)
		return SHMQ_INVALID;
	r = registry_lock(b, until);
	if (r)
		return r;
	e = &b->stores[store];
	if (ld(&e->state) != SHMQ_ENTRY_LIVE || e->serial != serial) {
		r = SHMQ_GONE;
	} else {
		atomic_fetch_add(&e->generation, 1); /* SYNC(store-entry) */
		SHMQ_KILLPOINT("remove_store.generation");
		st_release(&e->state, SHMQ_ENTRY_FREE); /* SYNC(store-entry) */
	}
	registry_unlock(b);
	return r;
}
