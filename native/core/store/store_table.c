/*
 * The index of a results store: from keys to entries, and everything that is derived from the
 * entries' words: buckets, free list, arena, counts. All of it under the store's lock.
 *
 * An entry whose word is not 0 is a key with its value. A set fills a free entry, stores its word
 * (the commit), and then stores 0 in the word of the entry that the key had before. A rebuild that
 * finds a key twice keeps the greater word.
 *
 * death: a rebuild clears `dirty` last, so it may be killed anywhere and repeated.
 */
#include "store/store_table.h"

#include "base/atomics.h"
#include "base/bounds.h"
#include "base/killpoint.h"
#include "base/status.h"
#include "memory/arena.h"
#include "memory/segment.h"
#include "shmq.h"

#include <stdlib.h>
#include <string.h>

/* ---- SipHash-1-3: a client that chooses keys cannot make them collide without the seed ---- */

#define ROTATE(x, n) ((x) << (n) | (x) >> (64 - (n)))

static void sip_round(uint64_t v[4])
{
	v[0] += v[1];
	v[1] = ROTATE(v[1], 13) ^ v[0];
	v[0] = ROTATE(v[0], 32);
	v[2] += v[3];
	v[3] = ROTATE(v[3], 16) ^ v[2];
	v[0] += v[3];
	v[3] = ROTATE(v[3], 21) ^ v[0];
	v[2] += v[1];
	v[1] = ROTATE(v[1], 17) ^ v[2];
	v[2] = ROTATE(v[2], 32);
}

uint64_t store_hash(const uint64_t seed[2], const void *data, size_t length)
{
	uint64_t v[4] = {seed[0] ^ UINT64_C(0x736f6d6570736575), seed[1] ^ UINT64_C(0x646f72616e646f6d),
	                 seed[0] ^ UINT64_C(0x6c7967656e657261),
	                 seed[1] ^ UINT64_C(0x7465646279746573)};
	uint64_t word, last = (uint64_t)length << 56;
	const uint8_t *at = data;

	for (; length >= 8; length -= 8, at += 8) {
		memcpy(&word, at, 8);
		v[3] ^= word;
		sip_round(v);
		v[0] ^= word;
	}
	for (size_t i = 0; i < length; i++)
		last |= (uint64_t)at[i] << 8 * i;
	v[3] ^= last;
	sip_round(v);
	v[0] ^= last;
	v[2] ^= 0xff;
	for (int i = 0; i < 3; i++)
		sip_round(v);
	return v[0] ^ v[1] ^ v[2] ^ v[3];
}

/* ---- the index ---- */

static int broken(shmq_store *s)
{
	st(&s->d->dirty, 1);
	return SHMQ_CORRUPT;
}

static uint32_t entries_of(const shmq_store *s)
{
	return at_most(ld(&s->d->entries_committed), s->entries_backed);
}

static uint32_t *bucket_of(const shmq_store *s, uint64_t hash)
{
	return &s->buckets[hash & (power_of_two(entries_of(s)) - 1)];
}

bool store_body_in(const shmq_store *s, const shmq_result_desc *e, uint64_t *body,
                   uint32_t *key_length, uint32_t *length)
{
	uint32_t capacity = once(e->capacity);
	uint64_t committed = ld(&s->d->arena_committed);

	*body = once(e->body);
	*key_length = once(e->key_length);
	*length = once(e->length);
	return TRUST_CHECK(*key_length - 1 < SHMQ_KEY_MOST && *length <= capacity &&
	                   *key_length <= capacity - *length && committed <= s->arena_backed &&
	                   *body >= SHMQ_ARENA_HEAD && capacity < committed &&
	                   *body <= committed - capacity);
}

static bool is_key(const shmq_store *s, const shmq_result_desc *e, const store_key *key)
{
	uint32_t key_length, length;
	uint64_t body;

	return once(e->hash) == key->hash && once(e->key_length) == key->length &&
	       store_body_in(s, e, &body, &key_length, &length) &&
	       !memcmp(s->arena + body, key->data, key->length);
}

int store_find(shmq_store *s, const store_key *key, store_place *out)
{
	uint32_t n = entries_of(s), *first = bucket_of(s, key->hash), *link = first, at;

	for (uint32_t step = 0; (at = once(*link)) != SHMQ_NONE; link = &s->entries[at].next) {
		if (!TRUST_CHECK(at < n && step++ < n && ld(&s->entries[at].word)))
			return broken(s);
		if (is_key(s, &s->entries[at], key))
			break;
	}
	*out = (store_place){at == SHMQ_NONE ? first : link, at};
	return 0;
}

int store_place_of(shmq_store *s, uint32_t entry, store_place *out)
{
	uint32_t n = entries_of(s), *link = bucket_of(s, once(s->entries[entry].hash)), at;

	for (uint32_t step = 0; (at = once(*link)) != entry; link = &s->entries[at].next)
		if (!TRUST_CHECK(at < n && step++ < n))
			return broken(s);
	*out = (store_place){link, entry};
	return 0;
}

static uint64_t block_bytes(const shmq_result_desc *e)
{
	return (uint64_t)e->capacity + SHMQ_ARENA_HEAD;
}

static void free_push(shmq_store *s, uint32_t entry)
{
	s->entries[entry].next = s->d->free;
	s->d->free = entry;
}

bool store_free(shmq_store *s, store_place at)
{
	shmq_result_desc *e = &s->entries[at.entry];

	st_release(&e->word, 0); /* SYNC(store-word) */
	SHMQ_KILLPOINT("store.freed");
	*at.link = e->next;
	free_push(s, at.entry);
	bump(&s->d->keys, (uint32_t)-1);
	bump(&s->d->bytes, -block_bytes(e));
	if (arena_free(&s->d->arena, s->arena, ld(&s->d->arena_committed), e->body, e->capacity))
		return true;
	st(&s->d->dirty, 1);
	return false;
}

/* ---- the rebuild ---- */

/* The counts of index_make. */
typedef struct tally {
	uint32_t keys;
	uint64_t bytes, last;
	int64_t earliest;
} tally;

/* Two entries of one key: the one with the greater word stays. Returns true if that is the new one,
 * whose place is free then. `link` names the old one. */
static bool duel(shmq_store *s, uint32_t *link, uint64_t word, tally *t)
{
	uint32_t other = *link;
	shmq_result_desc *e = &s->entries[other];

	if (ld(&e->word) > word)
		return false;
	st(&e->word, 0);
	*link = e->next;
	free_push(s, other);
	t->keys--;
	t->bytes -= block_bytes(e);
	return true;
}

static void entry_list(shmq_store *s, uint32_t i, uint32_t mask, tally *t)
{
	shmq_result_desc *e = &s->entries[i];
	uint64_t word = ld(&e->word), body; /* SYNC(store-word) */
	uint32_t key_length, length, *first, *link;
	store_key key;

	if (!word)
		goto free;
	if (word > t->last)
		t->last = word;
	if (!store_body_in(s, e, &body, &key_length, &length))
		goto drop; /* garbage, not a death */
	key = (store_key){s->arena + body, key_length, e->hash};
	first = &s->buckets[e->hash & mask];
	for (link = first; *link != SHMQ_NONE; link = &s->entries[*link].next)
		if (is_key(s, &s->entries[*link], &key)) {
			if (!duel(s, link, word, t))
				goto drop;
			break;
		}
	e->next = *first;
	*first = i;
	t->keys++;
	t->bytes += block_bytes(e);
	if (e->expires < t->earliest)
		t->earliest = e->expires;
	return;
drop:
	st(&e->word, 0);
free:
	free_push(s, i);
}

/* Put the entries into their buckets or into the free list, and count them. */
static void index_make(shmq_store *s)
{
	uint32_t n = entries_of(s), mask = power_of_two(n) - 1;
	tally t = {.last = ld(&s->d->sequence), .earliest = INT64_MAX};

	memset(s->buckets, 0xff, ((size_t)mask + 1) * sizeof(*s->buckets)); /* SHMQ_NONE */
	s->d->free = SHMQ_NONE;
	for (uint32_t i = n; i--;)
		entry_list(s, i, mask, &t);
	st(&s->d->keys, t.keys);
	st(&s->d->bytes, t.bytes);
	st(&s->d->sequence, t.last);
	st(&s->d->next_expiry, t.earliest);
	s->d->sweep_at = 0;
}

/* A block that an entry owns, while the arena is made: the entry's number is in its header. */
typedef struct owned {
	uint64_t entry, unused;
} owned;

static owned *owned_at(const shmq_store *s, uint64_t unit)
{
	return (owned *)(void *)(s->arena + unit * SHMQ_ARENA_UNIT);
}

static bool block_is_one(const shmq_result_desc *e)
{
	return (e->body - SHMQ_ARENA_HEAD) % SHMQ_ARENA_UNIT == 0 &&
	       ((uint64_t)e->capacity + SHMQ_ARENA_HEAD) % SHMQ_ARENA_UNIT == 0;
}

/* Make the arena of the blocks that entries own. A bitmap of private memory, one bit for each unit,
 * brings them into the order of their addresses. Returns false if an entry had to go because its
 * block cannot be right: garbage, not a death. */
static bool arena_make(shmq_store *s, uint64_t *bits, uint64_t units)
{
	uint64_t committed = ld(&s->d->arena_committed);
	arena_cursor cursor = {0, 0};
	uint32_t n = entries_of(s);
	bool whole = true;

	memset(bits, 0, (units / 64 + 1) * sizeof(*bits));
	for (uint32_t i = 0; i < n; i++) {
		shmq_result_desc *e = &s->entries[i];
		uint64_t unit = (e->body - SHMQ_ARENA_HEAD) / SHMQ_ARENA_UNIT;

		if (!ld(&e->word))
			continue;
		if (!block_is_one(e) || bits[unit / 64] >> unit % 64 & 1) {
			st(&e->word, 0);
			whole = false;
			continue;
		}
		bits[unit / 64] |= UINT64_C(1) << unit % 64;
	}
	for (uint32_t i = 0; whole && i < n; i++)
		if (ld(&s->entries[i].word))
			owned_at(s, (s->entries[i].body - SHMQ_ARENA_HEAD) / SHMQ_ARENA_UNIT)->entry = i;
	arena_reset(&s->d->arena);
	for (uint64_t w = 0; whole && w < units / 64 + 1; w++)
		for (uint64_t left = bits[w]; left; left &= left - 1) {
			uint64_t unit = w * 64 + (uint64_t)__builtin_ctzll(left);
			uint64_t i = owned_at(s, unit)->entry;
			shmq_result_desc *e = &s->entries[i < n ? i : 0];

			if (!arena_claim(&s->d->arena, s->arena, committed, &cursor,
			                 unit * SHMQ_ARENA_UNIT + SHMQ_ARENA_HEAD, e->capacity)) {
				st(&e->word, 0);
				whole = false;
			}
		}
	if (whole)
		arena_seal(&s->d->arena, s->arena, committed, &cursor);
	return whole;
}

#define ROUNDS 16u

int store_rebuild(shmq_store *s)
{
	uint64_t units = ld(&s->d->arena_committed) / SHMQ_ARENA_UNIT, *bits;
	uint32_t rounds = 0;
	bool whole;

	st(&s->d->dirty, 1);
	SHMQ_KILLPOINT("store_rebuild.begin");
	bits = malloc((units / 64 + 1) * sizeof(*bits));
	if (!bits)
		return SHMQ_NO_MEMORY;
	/* Each round that finds garbage frees an entry. */
	do
		index_make(s);
	while (!(whole = arena_make(s, bits, units)) && rounds++ < ROUNDS);
	free(bits);
	if (!whole)
		return fail(SHMQ_CORRUPT,
		            "results store %llu: something goes on overwriting it; delete the store",
		            (unsigned long long)s->serial);
	/* Somebody may wait for a value that the dead process has stored. */
	for (uint32_t i = 0; i < SHMQ_STORE_STRIPES; i++)
		store_noted(s, i);
	SHMQ_KILLPOINT("store_rebuild.clear");
	st_release(&s->d->dirty, 0); /* SYNC(store-dirty) */
	return 0;
}

void store_purge(shmq_store *s, int64_t now)
{
	uint32_t n = entries_of(s);
	int64_t earliest = INT64_MAX;
	bool whole = true;

	for (uint32_t i = 0; i < n; i++) {
		shmq_result_desc *e = &s->entries[i];

		if (!ld(&e->word))
			continue;
		if (e->expires > now) {
			if (e->expires < earliest)
				earliest = e->expires;
			continue;
		}
		whole = store_expire(s, i) && whole;
	}
	if (!whole) {
		(void)store_rebuild(s); /* it finds the next expiry, too */
		return;
	}
	st(&s->d->next_expiry, earliest);
	s->d->sweep_at = 0;
}

bool store_expire(shmq_store *s, uint32_t entry)
{
	store_place at;

	if (store_place_of(s, entry, &at))
		return false;
	bump(&s->d->expired, 1);
	return store_free(s, at);
}

/* ---- growing ---- */

#define ARENA_STEP (UINT64_C(8) << 20) /* bytes that are added at once, unless more are needed */

int store_back(shmq_store *s, uint32_t entries, uint64_t arena)
{
	uint32_t have = s->entries_backed;
	uint64_t buckets = have ? power_of_two(have) : 0;
	int r = 0;

	if (entries > have) {
		r = segment_commit(s->base, (uint64_t)((uint8_t *)&s->entries[have] - s->base),
		                   (uint64_t)(entries - have) * sizeof(*s->entries));
		if (!r && power_of_two(entries) > buckets)
			r = segment_commit(s->base, (uint64_t)((uint8_t *)&s->buckets[buckets] - s->base),
			                   (power_of_two(entries) - buckets) * sizeof(*s->buckets));
		if (r)
			return r;
		s->entries_backed = entries;
	}
	if (arena > s->arena_backed) {
		r = segment_commit(s->base, (uint64_t)(s->arena - s->base) + s->arena_backed,
		                   arena - s->arena_backed);
		if (!r)
			s->arena_backed = arena;
	}
	return r;
}

int store_grow_arena(shmq_store *s, uint64_t bytes)
{
	shmq_store_desc *d = s->d;
	uint64_t have = ld(&d->arena_committed), step = have, want;
	int r;

	if (step > ARENA_STEP)
		step = ARENA_STEP;
	if (step < bytes + SHMQ_ARENA_UNIT)
		step = bytes + SHMQ_ARENA_UNIT;
	want = round_page(have + step);
	if (want > s->arena_max)
		want = s->arena_max;
	if (want < have + bytes)
		return SHMQ_STORE_FULL;
	/* Pages after the committed part may have been given back since this process saw them. */
	s->arena_backed = have;
	r = store_back(s, 0, want);
	if (r)
		return r;
	SHMQ_KILLPOINT("store_arena.backed");
	if (!arena_extend(&d->arena, s->arena, have, want)) {
		st(&d->dirty, 1);
		return SHMQ_CORRUPT;
	}
	st_release(&d->arena_committed, want); /* SYNC(store-committed) */
	return 0;
}

/* The most entries that are added at once, so that nobody waits longer than their pages take. */
#define STEP 65536u

int store_grow(shmq_store *s)
{
	uint32_t n = entries_of(s), want = n + (n < STEP ? n : STEP);
	bool was_dirty = ld(&s->d->dirty);
	int r;

	if (want > s->entries_max)
		want = s->entries_max;
	if (want <= n)
		return SHMQ_STORE_FULL;
	r = store_back(s, want, 0);
	if (r)
		return r;
	SHMQ_KILLPOINT("store_grow.backed");
	if (power_of_two(want) != power_of_two(n)) {
		st(&s->d->dirty, 1);                        /* the keys move to other buckets */
		st_release(&s->d->entries_committed, want); /* SYNC(store-committed) */
		SHMQ_KILLPOINT("store_grow.committed");
		index_make(s);
		if (!was_dirty)
			st_release(&s->d->dirty, 0); /* SYNC(store-dirty) */
		return 0;
	}
	for (uint32_t i = want; i-- > n;) {
		st(&s->entries[i].word, 0);
		free_push(s, i);
	}
	st_release(&s->d->entries_committed, want); /* SYNC(store-committed) */
	return 0;
}

/* ---- news ---- */

void store_noted(shmq_store *s, uint32_t stripe)
{
	_Atomic uint32_t *stored = &s->d->stripes[stripe].stored;

	st_release(stored, ld(stored) + 1); /* SYNC(store-stripe) */
}
