/*
 * shmq: the contract of the core for results stores: key -> bytes in shared memory.
 *
 * A store is a segment of its own, which the supervisor makes. The directory's table of stores
 * names it. A client finds it there, opens the segment, and hands its descriptor to
 * shmq_store_open. shmq.h says what results, arguments, `until`, death, fork and threads mean.
 *
 * Each call takes the store's one robust lock for the time of a copy. The word of a key's entry is
 * the truth; everything else is derived from the words by the next locker after a death. So a death
 * anywhere in a call leaves the old value or the new one.
 *
 * A key that has expired is never found: whoever meets it removes it.
 */
#ifndef SHMQ_STORE_H
#define SHMQ_STORE_H

#include "shmq.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct shmq_store shmq_store;

/* Besides the statuses of shmq.h each call on a store may return SHMQ_GONE: the store was deleted,
 * or the broker was stopped; and SHMQ_INVALID: the key has no byte, or more than 255. */

/* Find the store of this name. SHMQ_GONE: there is none. */
int shmq_store_find(shmq_broker *b, const char *name, uint32_t *store, uint64_t *serial);
/* Request a store from the supervisor, as shmq_request_post. max_keys: 1 to 2^24; max_bytes: 64 KiB
 * to 256 GiB of keys and values, each pair rounded up to 64 bytes after 16 bytes more. SHMQ_INVALID:
 * limits out of these bounds. */
int shmq_store_request(shmq_broker *b, const char *name, uint32_t max_keys, uint64_t max_bytes,
                       int64_t until, uint32_t *ticket);
/* SHMQ_INVALID, with details, if a store cannot have these limits. */
int shmq_store_limits_check(uint64_t max_keys, uint64_t max_bytes);
/* Map the store's segment, which `fd` refers to; `fd` may be closed afterwards. SHMQ_LAYOUT,
 * SHMQ_CORRUPT, SHMQ_NO_MEMORY. */
int shmq_store_open(shmq_broker *b, uint32_t store, uint64_t serial, int fd, shmq_store **out);
/* Free the handle. No thread may use it any more. */
void shmq_store_close(shmq_store *s);

/*
 * Store a value, in place of the key's value if it has one. ttl: ns after which the key expires, at
 * least 1; INT64_MAX: never. only_if_absent: do nothing if the key is there. stored: false if so.
 * SHMQ_STORE_FULL: it has max_keys keys, or max_bytes bytes; SHMQ_NO_SPACE; SHMQ_TOO_BIG: the value
 * is longer than a message may be, or than the store; SHMQ_INVALID, too, for a ttl below 1.
 * death: the key has the old value, or none as before, or the new one.
 */
int shmq_store_set(shmq_store *s, const shmq_body *key, const shmq_body *value, int64_t ttl,
                   bool only_if_absent, int64_t until, bool *stored);
/* Copy the key's value to `buffer`, which has `capacity` bytes, and with `take` delete the key.
 * length: of the value. SHMQ_EMPTY: there is no such key. SHMQ_TOO_BIG: the value is longer than
 * the buffer; `length` is set, and nothing was copied or deleted. death: as shmq_store_delete. */
int shmq_store_get(shmq_store *s, const shmq_body *key, bool take, int64_t until, void *buffer,
                   uint64_t capacity, uint64_t *length);
/* Delete the key; with only_if (else NULL) only if it has this value. deleted: false if not.
 * death: the key is there with its value, or it is not. */
int shmq_store_delete(shmq_store *s, const shmq_body *key, const shmq_body *only_if, int64_t until,
                      bool *deleted);
/*
 * Add `by` to a number, which is stored as decimal text. A key that is missing counts as 0 and gets
 * `ttl` (as shmq_store_set); another one keeps the time at which it expires, unless `renew`: then a
 * step that changes the number gives the key `ttl` again, in the same commit. value: the result.
 * changed: false if that would be below `least` or above `most`; the number then stays as it is, and
 * `value` is the number. SHMQ_NO_NUMBER: the value is no decimal number of 64 bits. Otherwise as
 * shmq_store_set. death: as shmq_store_set.
 */
typedef struct shmq_store_step {
	int64_t by, least, most, ttl;
	bool renew;
} shmq_store_step;
int shmq_store_incr(shmq_store *s, const shmq_body *key, const shmq_store_step *step, int64_t until,
                    int64_t *value, bool *changed);

/* The counts of a store. keys, bytes: those that have expired and were not met since are counted
 * too; bytes: as max_bytes counts them. */
typedef struct shmq_store_info {
	uint32_t max_keys, keys;
	uint64_t max_bytes, bytes;
	uint64_t stored, removed, expired, refused; /* since it was made */
	uint64_t committed;                         /* bytes of memory for keys and values */
} shmq_store_info;
/* Read the counts without a lock. */
void shmq_store_get_info(const shmq_store *s, shmq_store_info *out);

/*
 * Walk through all keys, in no order. bucket: 0 at first, then as the last call left it; `more` is
 * false at the end. Each call copies the next keys, and their values if `values`, to `buffer`, as
 * many as fit into `capacity` bytes: a shmq_store_record, the key, the value. used: bytes of it.
 * A key that is there all the time is returned; while the store grows it may be returned twice.
 * SHMQ_TOO_BIG: not even the next keys fit; `used` is set to what they need.
 */
typedef struct shmq_store_record {
	int64_t ttl;     /* ns until it expires; INT64_MAX: never */
	uint32_t length; /* of the value, also if it is not copied */
	uint32_t key_length;
} shmq_store_record;
typedef struct shmq_store_room {
	void *buffer;
	uint64_t capacity;
} shmq_store_room;
int shmq_store_scan(shmq_store *s, bool values, uint32_t *bucket, const shmq_store_room *room,
                    int64_t until, uint64_t *used, bool *more);

/*
 * Waiting. A key belongs to one of 64 stripes. A waiter reads how often keys of each stripe were
 * stored, then looks for its keys, then waits for the stripes of its keys: it sleeps only if nothing
 * was stored there since it read the numbers.
 */
#define SHMQ_STRIPES 64
/* The stripe of a key, from 0 to 63. */
uint32_t shmq_store_stripe(const shmq_store *s, const shmq_body *key);
void shmq_store_seen(const shmq_store *s, uint32_t seen[SHMQ_STRIPES]);
/* Sleep until something is stored in one of the `stripes` (bits), until `deadline` (CLOCK_MONOTONIC
 * ns), or for 1 s. w: NULL; or a waiter, with which shmq_waiter_wake ends the wait. Returns 0 if
 * another look is worth it; SHMQ_TIMEOUT, SHMQ_INTERRUPTED.
 * death: a bit is left in the stripes' bitmaps; the next set there clears it. */
int shmq_store_wait(shmq_store *s, shmq_waiter *w, uint64_t stripes,
                    const uint32_t seen[SHMQ_STRIPES], int64_t deadline);

/* ---- for the supervisor --------------------------------------------------------------------- */

typedef struct shmq_store_spec {
	uint32_t store, max_keys;
	uint64_t serial, max_bytes;
	const char *name;
} shmq_store_spec;
/* Find a free place in the table of stores, and draw a new serial for the segment's name.
 * SHMQ_TABLE_FULL: there are 128 stores. death: a serial is lost. */
int shmq_store_reserve(shmq_broker *b, int64_t until, uint32_t *store, uint64_t *serial);
/* Make a new store of the empty shared memory object `fd`, as shmq_queue_create. */
int shmq_store_create(shmq_broker *b, int fd, const shmq_store_spec *spec);
/* Enter the store in the directory. One store makes it visible. SHMQ_BAD_NAME; SHMQ_INVALID: there
 * is a store of this name, or the place is taken. death: it is entered or it is not. */
int shmq_store_enter(shmq_broker *b, const shmq_store_spec *spec, int64_t until);
/* Take the store out of the directory; shmq_store_retire comes first. Unlink its name afterwards.
 * SHMQ_GONE: it is not there. death: it is entered or it is not. */
int shmq_store_remove(shmq_broker *b, uint32_t store, uint64_t serial, int64_t until);
/* Close the segment for all others, and wake everybody who waits (SHMQ_GONE). This handle can go on
 * with shmq_store_scan. Waits for the lock up to `until`. death: it is closed or it is not. */
int shmq_store_retire(shmq_store *s, int64_t until);
/* Open a segment again that shmq_store_retire closed and that is still in the directory, before
 * shmq_store_open. SHMQ_LAYOUT. */
int shmq_store_reopen(int fd);
/* Remove keys that have expired by `now` (CLOCK_MONOTONIC ns): look at the next `limit` entries.
 * more: there is another step to do. A store without such keys is not looked at. expired: how many
 * keys were removed. death: each key is removed or it is not. */
int shmq_store_sweep(shmq_store *s, int64_t now, uint32_t limit, int64_t until, uint32_t *expired,
                     bool *more);
/* Give the pages behind the last value back to the system. bytes: by how much the store shrank.
 * death: it is as large as before, or it is smaller and the next trim gives its pages back. */
int shmq_store_trim(shmq_store *s, int64_t until, uint64_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
