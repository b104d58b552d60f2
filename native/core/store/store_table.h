/* The index of a results store; store_table.c has the rules. All of it is called under the lock. */
#ifndef SHMQ_STORE_TABLE_H
#define SHMQ_STORE_TABLE_H

#include "memory/store_handle.h"

uint64_t store_hash(const uint64_t seed[2], const void *data, size_t length);
/* Find a key's entry. SHMQ_CORRUPT: something has overwritten the index; it is dirty then. */
int store_find(shmq_store *s, const store_key *key, store_place *out);
/* Free the entry at this place: its word first. Returns false if the store must be rebuilt. */
bool store_free(shmq_store *s, store_place at);
/* The place of an entry in the index; as store_find. */
int store_place_of(shmq_store *s, uint32_t entry, store_place *out);
/* Remove an entry that has expired. Returns false if the store must be rebuilt. */
bool store_expire(shmq_store *s, uint32_t entry);
/* Remove all that have expired by `now`. Places are invalid afterwards. */
void store_purge(shmq_store *s, int64_t now);
/* Returns true if key and value lie inside the arena. */
bool store_body_in(const shmq_store *s, const shmq_result_desc *e, uint64_t *body,
                   uint32_t *key_length, uint32_t *length);
/* Derive everything from the entries' words again. SHMQ_NO_MEMORY: it stays dirty. */
int store_rebuild(shmq_store *s);
/* Make more entries. SHMQ_STORE_FULL: there are entries_max; SHMQ_NO_SPACE. Invalidates places. */
int store_grow(shmq_store *s);
/* Make the arena larger, by at least this number of bytes. SHMQ_STORE_FULL: it is as large as it may be;
 * SHMQ_NO_SPACE; SHMQ_CORRUPT: the store must be rebuilt. */
int store_grow_arena(shmq_store *s, uint64_t bytes);
/* Back so many entries with their buckets, and so much of the arena, with pages. SHMQ_NO_SPACE. */
int store_back(shmq_store *s, uint32_t entries, uint64_t arena);
/* Note that a key of this stripe was stored. */
void store_noted(shmq_store *s, uint32_t stripe);

#endif
