/*
 * Set, get, delete and count in a results store, and walking through it.
 *
 *   set   a block and a free entry are chosen; key, value and fields; the entry's word (the commit);
 *         the index; the word of the key's old entry becomes 0; its block is freed
 *
 * death before the commit: the entry is free. After it: the new value counts, because its word is
 * the greater one; the rebuild frees the old entry.
 */

#include "base/atomics.h"
#include "base/bounds.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "base/status.h"
#include "memory/arena.h"
#include "memory/segment.h"
#include "store/store_segment.h"
#include "store/store_table.h"

#include <stdio.h>
#include <string.h>

static int key_of(const shmq_store *s, const shmq_body *key, store_key *out)
{
	if (!key->length || key->length > SHMQ_KEY_MOST)
		return fail(SHMQ_INVALID, "a key has 1 to 255 bytes, not %llu",
		            (unsigned long long)key->length);
	*out = (store_key){key->data, (uint32_t)key->length,
	                   store_hash(s->seed, key->data, key->length)};
	return 0;
}

/* How often a call that finds derived state overwritten has it rebuilt and tries again. */
#define TRIES 4

/* Make `step` under the lock. SHMQ_CORRUPT with `dirty`: it found garbage, and is made again. */
#define UNDER_LOCK(s, until, status, step)                                                         \
	do {                                                                                           \
		(status) = store_lock(s, until);                                                           \
		if (status)                                                                                \
			break;                                                                                 \
		for (int tries_ = 0; tries_ < TRIES; tries_++) {                                           \
			(status) = (step);                                                                     \
			if ((status) != SHMQ_CORRUPT || !ld(&(s)->d->dirty))                                   \
				break;                                                                             \
			(status) = store_rebuild(s);                                                           \
			if (status)                                                                            \
				break;                                                                             \
			(status) = SHMQ_CORRUPT;                                                               \
		}                                                                                          \
		store_unlock(s);                                                                           \
	} while (0)

/* Free an entry whose word decides that the key is gone. Places are invalid afterwards. */
static void release(shmq_store *s, store_place at)
{
	if (!store_free(s, at))
		(void)store_rebuild(s); /* if it fails, the next locker does it */
}

/* Find a key that has not expired. */
static int look(shmq_store *s, const store_key *key, store_place *out)
{
	int r = store_find(s, key, out);

	if (r || out->entry == SHMQ_NONE || s->entries[out->entry].expires > now_ns())
		return r;
	bump(&s->d->expired, 1);
	release(s, *out);
	return store_find(s, key, out);
}

/* ---- set ---- */

typedef struct storing {
	store_key key;
	const void *value;
	uint64_t length;
	int64_t expires;
	bool only_if_absent;
} storing;

static int block_alloc(shmq_store *s, uint64_t length, uint64_t *body, uint32_t *capacity)
{
	for (;;) {
		int r;

		*body = arena_alloc(&s->d->arena, s->arena, ld(&s->d->arena_committed), length, capacity);
		if (*body == ARENA_BROKEN) {
			st(&s->d->dirty, 1);
			return SHMQ_CORRUPT;
		}
		if (*body != ARENA_FAILED)
			return 0;
		r = store_grow_arena(s, arena_block_size(length));
		if (r)
			return r;
	}
}

/* Find the key's place, and room for it: a free entry and a block. body: 0 if the key is there and
 * must be absent. */
static int room_once(shmq_store *s, const storing *w, store_place *at, uint64_t *body,
                     uint32_t *capacity)
{
	uint64_t length = w->key.length + w->length, old = 0;
	int r = s->d->free == SHMQ_NONE ? store_grow(s) : 0;

	*body = 0;
	if (r == SHMQ_STORE_FULL) { /* one is always free */
		st(&s->d->dirty, 1);
		return SHMQ_CORRUPT;
	}
	if (!r)
		r = look(s, &w->key, at);
	if (r)
		return r;
	if (at->entry != SHMQ_NONE) {
		if (w->only_if_absent)
			return 0;
		old = (uint64_t)s->entries[at->entry].capacity + SHMQ_ARENA_HEAD;
	}
	if ((!old && ld(&s->d->keys) >= s->max_keys) ||
	    ld(&s->d->bytes) - old + arena_block_size(length) > s->max_bytes)
		return SHMQ_STORE_FULL;
	return block_alloc(s, length, body, capacity);
}

/* The same; if there is no room, what has expired goes first. */
static int room(shmq_store *s, const storing *w, store_place *at, uint64_t *body,
                uint32_t *capacity)
{
	int r = room_once(s, w, at, body, capacity);

	if ((r == SHMQ_STORE_FULL || r == SHMQ_NO_SPACE) && ld(&s->d->next_expiry) <= now_ns()) {
		store_purge(s, now_ns());
		r = room_once(s, w, at, body, capacity);
	}
	if (r == SHMQ_STORE_FULL || r == SHMQ_NO_SPACE)
		bump(&s->d->refused, 1);
	return r;
}

static void expiry_note(shmq_store *s, int64_t expires)
{
	if (expires < ld(&s->d->next_expiry))
		st(&s->d->next_expiry, expires);
	if (expires < s->d->sweep_earliest)
		s->d->sweep_earliest = expires;
}

static int put(shmq_store *s, const storing *w, bool *stored)
{
	shmq_store_desc *d = s->d;
	uint32_t capacity, entry, old;
	shmq_result_desc *e;
	store_place at;
	uint64_t body;
	int r = room(s, w, &at, &body, &capacity);

	if (r)
		return r;
	*stored = body != 0;
	if (!body)
		return 0;
	entry = once(d->free);
	if (!TRUST_CHECK(entry < s->entries_backed && !ld(&s->entries[entry].word))) {
		st(&d->dirty, 1);
		return SHMQ_CORRUPT;
	}
	e = &s->entries[entry];
	memcpy(s->arena + body, w->key.data, w->key.length);
	if (w->length)
		memcpy(s->arena + body + w->key.length, w->value, w->length);
	e->hash = w->key.hash;
	e->body = body;
	e->expires = w->expires;
	e->capacity = capacity;
	e->length = (uint32_t)w->length;
	e->key_length = (uint16_t)w->key.length;
	d->free = e->next;
	SHMQ_KILLPOINT("store_set.filled");
	bump(&d->sequence, 1);
	st_release(&e->word, ld(&d->sequence)); /* SYNC(store-word) */
	SHMQ_KILLPOINT("store_set.committed");
	old = at.entry;
	e->next = *at.link;
	*at.link = entry;
	bump(&d->keys, 1);
	bump(&d->bytes, (uint64_t)capacity + SHMQ_ARENA_HEAD);
	bump(&d->stored, 1);
	expiry_note(s, w->expires);
	if (old != SHMQ_NONE)
		release(s, (store_place){&e->next, old});
	store_noted(s, stripe_of(w->key.hash));
	return 0;
}

static int value_check(const shmq_store *s, uint64_t key_length, uint64_t length)
{
	uint64_t has = shared_memory_below(length);

	if (has)
		return fail(SHMQ_TOO_BIG,
		            "the value has %llu bytes, and /dev/shm %llu: enlarge it (docker run "
		            "--shm-size=...)",
		            (unsigned long long)length, (unsigned long long)has);
	if (length > s->max_value)
		return fail(SHMQ_TOO_BIG,
		            "the value has %llu bytes, and a message of this broker has at most %llu "
		            "(max_msg_size): raise that option of the broker (--max-msg-size)",
		            (unsigned long long)length, (unsigned long long)s->max_value);
	if (arena_block_size(key_length + length) > s->max_bytes)
		return fail(SHMQ_TOO_BIG,
		            "the value has %llu bytes, and all of the store at most %llu (max_bytes)",
		            (unsigned long long)length, (unsigned long long)s->max_bytes);
	return 0;
}

static int ttl_check(int64_t ttl)
{
	return ttl > 0 ? 0 : fail(SHMQ_INVALID, "a time to live is longer than 0");
}

int shmq_store_set(shmq_store *s, const shmq_body *key, const shmq_body *value, int64_t ttl,
                   bool only_if_absent, int64_t until, bool *stored)
{
	storing w = {.value = value->data, .length = value->length, .only_if_absent = only_if_absent};
	int r = key_of(s, key, &w.key);

	if (!r)
		r = value_check(s, w.key.length, w.length);
	if (!r)
		r = ttl_check(ttl);
	if (r)
		return r;
	w.expires = later(now_ns(), ttl);
	UNDER_LOCK(s, until, r, put(s, &w, stored));
	if (!r && *stored)
		store_wake(s, stripe_of(w.key.hash));
	return r;
}

/* ---- get, delete ---- */

static int copy(shmq_store *s, const store_key *key, bool take, void *buffer, uint64_t capacity,
                uint64_t *length)
{
	uint32_t key_length, value_length;
	store_place at;
	uint64_t body;
	int r = look(s, key, &at);

	if (r)
		return r;
	if (at.entry == SHMQ_NONE)
		return SHMQ_EMPTY;
	if (!store_body_in(s, &s->entries[at.entry], &body, &key_length, &value_length)) {
		st(&s->d->dirty, 1);
		return SHMQ_CORRUPT;
	}
	*length = value_length;
	if (value_length > capacity)
		return SHMQ_TOO_BIG;
	memcpy(buffer, s->arena + body + key_length, value_length);
	if (take) {
		bump(&s->d->removed, 1);
		release(s, at);
	}
	return 0;
}

int shmq_store_get(shmq_store *s, const shmq_body *key, bool take, int64_t until, void *buffer,
                   uint64_t capacity, uint64_t *length)
{
	store_key k;
	int r = key_of(s, key, &k);

	if (r)
		return r;
	UNDER_LOCK(s, until, r, copy(s, &k, take, buffer, capacity, length));
	return r;
}

static int drop(shmq_store *s, const store_key *key, const shmq_body *only_if, bool *deleted)
{
	uint32_t key_length, length;
	store_place at;
	uint64_t body;
	int r = look(s, key, &at);

	if (r)
		return r;
	*deleted = at.entry != SHMQ_NONE;
	if (!*deleted)
		return 0;
	if (only_if) {
		if (!store_body_in(s, &s->entries[at.entry], &body, &key_length, &length)) {
			st(&s->d->dirty, 1);
			return SHMQ_CORRUPT;
		}
		*deleted = length == only_if->length &&
		           (!length || !memcmp(s->arena + body + key_length, only_if->data, length));
	}
	if (*deleted) {
		bump(&s->d->removed, 1);
		release(s, at);
	}
	return 0;
}

int shmq_store_delete(shmq_store *s, const shmq_body *key, const shmq_body *only_if, int64_t until,
                      bool *deleted)
{
	store_key k;
	int r = key_of(s, key, &k);

	if (r)
		return r;
	UNDER_LOCK(s, until, r, drop(s, &k, only_if, deleted));
	return r;
}

/* ---- numbers ---- */

#define DIGITS 24 /* of a number of 64 bits, its sign and its end */

/* Returns false if the text is no decimal number of 64 bits. */
static bool number_parse(const uint8_t *text, uint32_t length, int64_t *out)
{
	uint32_t at = length && *text == '-';
	int64_t value = 0;

	if (at == length || length >= DIGITS)
		return false;
	for (; at < length; at++) {
		int digit = text[at] - '0';

		if (digit < 0 || digit > 9 || __builtin_mul_overflow(value, 10, &value) ||
		    __builtin_sub_overflow(value, digit, &value))
			return false;
	}
	/* It was added up as a negative number, because there is one more of those. */
	if (*text != '-' && __builtin_sub_overflow(0, value, &value))
		return false;
	*out = value;
	return true;
}

typedef struct counting {
	int64_t by, least, most, ttl;
	int64_t value;
	bool renew, changed;
} counting;

static int count(shmq_store *s, const store_key *key, counting *c)
{
	storing w = {.key = *key, .expires = later(now_ns(), c->ttl)};
	uint32_t key_length, length;
	char text[DIGITS];
	int64_t before = 0;
	store_place at;
	uint64_t body;
	bool stored;
	int r = look(s, key, &at);

	if (r)
		return r;
	if (at.entry != SHMQ_NONE) {
		if (!store_body_in(s, &s->entries[at.entry], &body, &key_length, &length)) {
			st(&s->d->dirty, 1);
			return SHMQ_CORRUPT;
		}
		if (!number_parse(s->arena + body + key_length, length, &before))
			return SHMQ_NO_NUMBER;
		if (!c->renew)
			w.expires = s->entries[at.entry].expires;
	}
	c->changed = !__builtin_add_overflow(before, c->by, &c->value) && c->value >= c->least &&
	             c->value <= c->most;
	if (!c->changed) {
		c->value = before;
		return 0;
	}
	w.value = text;
	w.length = (uint64_t)snprintf(text, sizeof(text), "%lld", (long long)c->value);
	return put(s, &w, &stored);
}

int shmq_store_incr(shmq_store *s, const shmq_body *key, const shmq_store_step *step, int64_t until,
                    int64_t *value, bool *changed)
{
	counting c = {.by = step->by,
	              .least = step->least,
	              .most = step->most,
	              .ttl = step->ttl,
	              .renew = step->renew};
	store_key k;
	int r = key_of(s, key, &k);

	if (!r)
		r = ttl_check(step->ttl);
	if (r)
		return r;
	UNDER_LOCK(s, until, r, count(s, &k, &c));
	if (r)
		return r;
	*value = c.value;
	*changed = c.changed;
	if (c.changed)
		store_wake(s, stripe_of(k.hash));
	return 0;
}

/* ---- walking ---- */

#define BUCKETS_AT_ONCE 16384u /* looked at in one call, so that nobody waits long */

typedef struct walk {
	bool values, more;
	uint32_t bucket;
	uint8_t *buffer;
	uint64_t capacity, used;
	int64_t now;
} walk;

/* Copy the keys of one bucket. `used` grows by what they need, also if they do not fit. */
static int bucket_copy(shmq_store *s, walk *w)
{
	uint32_t n = s->entries_backed, at = once(s->buckets[w->bucket]);

	for (uint32_t step = 0; at != SHMQ_NONE; at = once(s->entries[at].next)) {
		shmq_store_record head = {0};
		uint64_t body, whole;

		if (!TRUST_CHECK(at < n && step++ < n && ld(&s->entries[at].word)) ||
		    !store_body_in(s, &s->entries[at], &body, &head.key_length, &head.length)) {
			st(&s->d->dirty, 1);
			return SHMQ_CORRUPT;
		}
		head.ttl = once(s->entries[at].expires);
		if (head.ttl <= w->now)
			continue;
		if (head.ttl != INT64_MAX)
			head.ttl -= w->now;
		whole = (uint64_t)head.key_length + (w->values ? head.length : 0);
		if (w->used + sizeof(head) + whole <= w->capacity) {
			memcpy(w->buffer + w->used, &head, sizeof(head));
			memcpy(w->buffer + w->used + sizeof(head), s->arena + body, whole);
		}
		w->used += sizeof(head) + whole;
	}
	return 0;
}

static int buckets_copy(shmq_store *s, walk *w)
{
	uint32_t all = power_of_two(s->entries_backed), end = w->bucket + BUCKETS_AT_ONCE;

	w->now = now_ns();
	w->used = 0;
	for (; w->bucket < all && w->bucket < end; w->bucket++) {
		uint64_t before = w->used;
		int r = bucket_copy(s, w);

		if (r)
			return r;
		if (w->used <= w->capacity)
			continue;
		if (!before)
			return SHMQ_TOO_BIG;
		w->used = before;
		break;
	}
	w->more = w->bucket < all;
	return 0;
}

int shmq_store_scan(shmq_store *s, bool values, uint32_t *bucket, const shmq_store_room *room,
                    int64_t until, uint64_t *used, bool *more)
{
	walk w = {.values = values, .buffer = room->buffer, .capacity = room->capacity};
	int r;

	UNDER_LOCK(s, until, r, (w.bucket = *bucket, buckets_copy(s, &w)));
	if (!r || r == SHMQ_TOO_BIG)
		*used = w.used;
	if (r)
		return r;
	*bucket = w.bucket;
	*more = w.more;
	return 0;
}

void shmq_store_get_info(const shmq_store *s, shmq_store_info *out)
{
	const shmq_store_desc *d = s->d;

	*out = (shmq_store_info){.max_keys = s->max_keys,
	                         .keys = ld(&d->keys),
	                         .max_bytes = s->max_bytes,
	                         .bytes = ld(&d->bytes),
	                         .stored = ld(&d->stored),
	                         .removed = ld(&d->removed),
	                         .expired = ld(&d->expired),
	                         .refused = ld(&d->refused),
	                         .committed = ld(&d->arena_committed)};
}
