/* Results stores: set, take, delete, count, expire, give memory back; making and removing one. */
#include "operations.h"

#include "../../native/checker_store.h"
#include "shmq_store.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

_Static_assert(SHMQ_STORE_FIRST == 16, "the core must be built for stores of 16 entries at first");

#define NAME "r"
#define KEYS 40u
#define BYTES (64u << 10)
#define WIDE 2600u /* a value for which the arena grows */

/* ---- a store, and what is in it: key k has the value body_make(k, length) or, after a change,
 * body_make(k + 1, ...); fate DUE: the old one; GROUP: either of the two; EITHER: the old one or
 * none; NEVER: the new one or none; NEWER: the new one; DONE: none. The ledger's fates of queue 3
 * tell. ---- */

#define NEWER 99

static uint8_t *fates(const scene *s)
{
	return s->ledger->fate[QUEUES - 1];
}

static uint64_t store_serial(const scene *s)
{
	const shmq_store_entry_desc *e = (const void *)(s->files->map[0] + directory_of(s)->stores_at);

	return e->serial;
}

static shmq_store_desc *store_of(const scene *s)
{
	return (void *)s->files->map[store_serial(s)];
}

static shmq_store *open_with(scene *s, shmq_broker *b)
{
	shmq_store *store = NULL;
	uint64_t serial;
	uint32_t index;

	EQUAL(shmq_store_find(b, NAME, &index, &serial), 0);
	CHECK(serial < FILES - 1);
	EQUAL(shmq_store_open(b, index, serial, s->files->fd[serial], &store), 0);
	return store;
}

static shmq_body key_of(uint32_t k)
{
	static char text[8][16];
	static uint32_t turn;
	char *at = text[turn++ % 8];

	return (shmq_body){at, (uint64_t)sprintf(at, "key %u", k)};
}

static int set(shmq_store *store, uint32_t k, uint32_t number, uint32_t length, int64_t ttl,
               bool only_if_absent)
{
	uint8_t *value = body_make(number, length);
	shmq_body key = key_of(k), body = {value, length};
	bool stored;
	int r = WATCHED(shmq_store_set(store, &key, &body, ttl, only_if_absent, soon(), &stored));

	free(value);
	return r;
}

static shmq_store_spec spec_make(shmq_broker *b)
{
	shmq_store_spec spec = {.max_keys = KEYS, .max_bytes = BYTES, .name = NAME};

	EQUAL(WATCHED(shmq_store_reserve(b, soon(), &spec.store, &spec.serial)), 0);
	CHECK(spec.serial < FILES - 1);
	return spec;
}

static void make_store(scene *s, shmq_broker *b)
{
	shmq_store_spec spec = spec_make(b);

	EQUAL(WATCHED(shmq_store_create(b, s->files->fd[spec.serial], &spec)), 0);
	EQUAL(WATCHED(shmq_store_enter(b, &spec, soon())), 0);
}

static void fill(scene *s, uint32_t n, uint32_t length)
{
	shmq_store *store;

	make_store(s, s->home);
	store = open_with(s, s->home);
	for (uint32_t k = 0; k < n; k++) {
		EQUAL(set(store, k, k, length, INT64_MAX, false), 0);
		fates(s)[k] = DUE;
	}
}

static void some_keys(scene *s)
{
	fill(s, 5, SMALL);
}

static void sixteen_keys(scene *s)
{
	fill(s, 16, SMALL);
}

static void large_values(scene *s)
{
	fill(s, 5, 2900);
}

static void all_keys(scene *s)
{
	fill(s, KEYS, SMALL);
}

static shmq_store *mine;

static void come_and_open(scene *s)
{
	come(s);
	mine = open_with(s, s->mine);
}

/* ---- what is there afterwards ---- */

static void see_key(scene *s, shmq_store *store, uint32_t k)
{
	static uint8_t buffer[32 << 10];
	shmq_body key = key_of(k);
	uint32_t number = MESSAGES;
	uint64_t length;
	int r = shmq_store_get(store, &key, false, soon(), buffer, sizeof(buffer), &length);

	CHECK(r == 0 || r == SHMQ_EMPTY);
	if (!r) {
		number = body_number(buffer, length);
		if (number != k && number != k + 1)
			wrong("key %u has a torn value", k);
	}
	switch (fates(s)[k]) {
	case DUE:
		EQUAL(number, k);
		break;
	case GROUP:
		CHECK(number == k || number == k + 1);
		break;
	case EITHER:
		CHECK(number == k || number == MESSAGES);
		break;
	case DONE:
		EQUAL(number, MESSAGES);
		break;
	case NEWER:
		EQUAL(number, k + 1);
		break;
	default:
		CHECK(number == k + 1 || number == MESSAGES);
	}
}

/* The next one repairs it: every key is whole, everything derived is right, and it works. */
static void the_store_is_whole(scene *s)
{
	shmq_broker *b = attach(s, SHMQ_AS_CLIENT);
	shmq_store *store = open_with(s, b);
	const char *says;

	for (uint32_t k = 0; k < KEYS; k++)
		see_key(s, store, k);
	says = checker_store(store_of(s));
	if (*says)
		wrong("the results store: %s", says);
	for (uint32_t k = 0; k < KEYS; k++) {
		shmq_body key = key_of(k);
		bool deleted;

		EQUAL(shmq_store_delete(store, &key, NULL, soon(), &deleted), 0);
	}
	EQUAL(store_of(s)->keys, 0);
	EQUAL(store_of(s)->bytes, 0);
	for (uint32_t k = 0; k < KEYS; k++) {
		EQUAL(set(store, k, k, SMALL, INT64_MAX, true), 0);
		fates(s)[k] = DUE;
		see_key(s, store, k);
	}
	says = checker_store(store_of(s));
	if (*says)
		wrong("the results store, used again: %s", says);
}

/* ---- set ---- */

/* Key 39 is not there before, and has no fate then: the new value or none. */
static void set_new(scene *s)
{
	EQUAL(set(mine, KEYS - 1, KEYS, SMALL, INT64_MAX, true), 0);
	fates(s)[KEYS - 1] = NEWER;
}

static void replace(scene *s)
{
	fates(s)[2] = GROUP;
	EQUAL(set(mine, 2, 3, LARGE, INT64_MAX, false), 0);
	fates(s)[2] = NEWER;
}

static void add_in_vain(scene *s)
{
	(void)s;
	EQUAL(set(mine, 2, 3, SMALL, INT64_MAX, true), 0);
}

static void set_wide(scene *s)
{
	EQUAL(set(mine, KEYS - 1, KEYS, WIDE, INT64_MAX, false), 0);
	fates(s)[KEYS - 1] = NEWER;
}

static void replace_in_the_full_store(scene *s)
{
	EQUAL(set(mine, KEYS, KEYS, SMALL, INT64_MAX, false), SHMQ_STORE_FULL);
	fates(s)[7] = GROUP;
	EQUAL(set(mine, 7, 8, SMALL, INT64_MAX, false), 0);
	fates(s)[7] = NEWER;
}

static void expire_now(scene *s, uint32_t from, uint32_t to)
{
	shmq_result_desc *e = (void *)((uint8_t *)store_of(s) + store_of(s)->entries_at);

	/* As if their time had been set so, and is over. */
	for (uint32_t i = 0; i < store_of(s)->entries_committed; i++)
		for (uint32_t k = from; k < to; k++) {
			const char *at = (const char *)store_of(s) + store_of(s)->arena_at + e[i].body;
			shmq_body key = key_of(k);

			if (e[i].word && e[i].key_length == key.length && !memcmp(at, key.data, key.length)) {
				e[i].expires = 1;
				fates(s)[k] = DONE;
			}
		}
	store_of(s)->next_expiry = 1;
}

static void all_keys_and_three_have_expired(scene *s)
{
	all_keys(s);
	expire_now(s, 10, 13);
}

static void set_where_some_have_expired(scene *s)
{
	fates(s)[11] = NEVER;
	EQUAL(set(mine, 11, 12, SMALL, INT64_MAX, false), 0);
	fates(s)[11] = NEWER;
	fates(s)[10] = NEVER;
	EQUAL(set(mine, 10, 11, LARGE, INT64_MAX, false), 0);
	fates(s)[10] = NEWER;
}

/* The arena has no room before what has expired is gone. */
static void large_values_and_some_have_expired(scene *s)
{
	fill(s, 32, 1900);
	expire_now(s, 1, 4);
}

static void set_two_wide(scene *s)
{
	EQUAL(set(mine, KEYS - 1, KEYS, WIDE, INT64_MAX, false), 0);
	fates(s)[KEYS - 1] = NEWER;
	EQUAL(set(mine, KEYS - 2, KEYS - 1, WIDE, INT64_MAX, false), 0);
	fates(s)[KEYS - 2] = NEWER;
}

/* ---- get, delete, numbers ---- */

static void take_value(scene *s)
{
	uint8_t buffer[LARGE];
	shmq_body key = key_of(1);
	uint64_t length;

	fates(s)[1] = EITHER;
	EQUAL(WATCHED(shmq_store_get(mine, &key, true, soon(), buffer, sizeof(buffer), &length)), 0);
	EQUAL(body_number(buffer, length), 1);
	fates(s)[1] = DONE;
}

static void get_expired(scene *s)
{
	uint8_t buffer[LARGE];
	shmq_body key = key_of(11);
	uint64_t length;

	(void)s;
	EQUAL(WATCHED(shmq_store_get(mine, &key, false, soon(), buffer, sizeof(buffer), &length)),
	      SHMQ_EMPTY);
}

static void delete_one(scene *s)
{
	shmq_body key = key_of(3);
	bool deleted;

	fates(s)[3] = EITHER;
	EQUAL(WATCHED(shmq_store_delete(mine, &key, NULL, soon(), &deleted)), 0);
	CHECK(deleted);
	fates(s)[3] = DONE;
}

static shmq_body number_key = {"n", 1};

static void some_keys_and_a_number(scene *s)
{
	shmq_store *store;
	int64_t value;
	bool changed;

	some_keys(s);
	store = open_with(s, s->home);
	EQUAL(shmq_store_incr(store, &number_key, &(shmq_store_step){9, 0, 10, INT64_MAX, false},
	                      soon(), &value, &changed),
	      0);
}

static void count_up(scene *s)
{
	int64_t value;
	bool changed;

	(void)s;
	EQUAL(WATCHED(shmq_store_incr(mine, &number_key, &(shmq_store_step){1, 0, 10, INT64_MAX, true},
	                              soon(), &value, &changed)),
	      0);
	CHECK(changed && value == 10);
	EQUAL(WATCHED(shmq_store_incr(mine, &number_key, &(shmq_store_step){1, 0, 10, INT64_MAX, false},
	                              soon(), &value, &changed)),
	      0);
	CHECK(!changed && value == 10);
}

static void the_number_is_whole(scene *s)
{
	shmq_broker *b = attach(s, SHMQ_AS_CLIENT);
	shmq_store *store = open_with(s, b);
	int64_t value;
	bool changed;

	EQUAL(shmq_store_incr(store, &number_key, &(shmq_store_step){0, 0, 10, INT64_MAX, false},
	                      soon(), &value, &changed),
	      0);
	CHECK(value == 9 || value == 10);
	EQUAL(shmq_store_delete(store, &number_key, NULL, soon(), &changed), 0);
	CHECK(changed);
	the_store_is_whole(s);
}

/* ---- waiting ---- */

static uint32_t stripe_of_new(scene *s)
{
	shmq_body key = key_of(KEYS - 1);

	return shmq_store_stripe(open_with(s, s->home), &key);
}

static void wait_on_new(scene *s, const shmq_broker *b, uint32_t bell)
{
	shmq_stripe_desc *stripe = &store_of(s)->stripes[stripe_of_new(s)];
	uint32_t client = shmq_broker_client(b);

	waiters_of(s)[bell].owner = (uint64_t)clients_of(s)[client].generation << 32 | (client + 1);
	if (directory_of(s)->waiters_high <= bell)
		directory_of(s)->waiters_high = bell + 1;
	stripe->waiters.words[0] |= UINT64_C(1) << bell;
	stripe->waiters.summary |= 1;
}

static void some_keys_and_a_waiter(scene *s)
{
	some_keys(s);
	wait_on_new(s, s->alive, BELL);
}

/* If the key is there it was rung, by the setter or by the reaper. */
static void the_waiter_was_rung(scene *s)
{
	shmq_store *store = open_with(s, s->alive);
	uint8_t buffer[LARGE];
	shmq_body key = key_of(KEYS - 1);
	uint64_t length;
	int rings;

	CHECK(!sem_getvalue(&waiters_of(s)[BELL].bell, &rings));
	if (!rings && !shmq_store_get(store, &key, false, soon(), buffer, sizeof(buffer), &length))
		wrong("a waiter sleeps on although its key is there");
	the_store_is_whole(s);
}

static void wait_in_vain(scene *s)
{
	shmq_body key = key_of(KEYS - 1), other = key_of(0);
	uint64_t stripes = UINT64_C(1) << shmq_store_stripe(mine, &key) |
	                   UINT64_C(1) << shmq_store_stripe(mine, &other);
	uint32_t seen[SHMQ_STRIPES];

	(void)s;
	watch_begin();
	shmq_store_seen(mine, seen);
	watch_end();
	EQUAL(WATCHED(shmq_store_wait(mine, NULL, stripes, seen, shmq_now() + 1000)), SHMQ_TIMEOUT);
}

/* ---- the supervisor's ---- */

static void come_to_sweep(scene *s)
{
	come_to_supervise(s);
	mine = open_with(s, s->mine);
}

static void sweep(scene *s)
{
	uint32_t expired, all = 0;
	bool more = true;

	(void)s;
	while (more) {
		EQUAL(WATCHED(shmq_store_sweep(mine, 1000, 20, soon(), &expired, &more)), 0);
		all += expired;
	}
	EQUAL(all, 3);
}

static void much_was_in_it(scene *s)
{
	shmq_store *store;

	fill(s, 6, 10000);
	store = open_with(s, s->home);
	for (uint32_t k = 1; k < 6; k++) {
		shmq_body key = key_of(k);
		bool deleted;

		EQUAL(shmq_store_delete(store, &key, NULL, soon(), &deleted), 0);
		fates(s)[k] = DONE;
	}
}

static void trim(scene *s)
{
	uint64_t bytes;

	(void)s;
	EQUAL(WATCHED(shmq_store_trim(mine, soon(), &bytes)), 0);
	CHECK(bytes > 20000);
}

static void create(scene *s)
{
	make_store(s, s->mine);
}

/* It is there and whole, or it can be made. */
static void create_again(scene *s)
{
	shmq_broker *b = attach(s, SHMQ_AS_SUPERVISOR);
	uint64_t serial;
	uint32_t index;

	if (shmq_store_find(b, NAME, &index, &serial) == SHMQ_GONE)
		make_store(s, b);
	the_store_is_whole(s);
}

static void retire_and_remove(scene *s)
{
	EQUAL(WATCHED(shmq_store_retire(mine, soon())), 0);
	EQUAL(WATCHED(shmq_store_remove(s->mine, 0, store_serial(s), soon())), 0);
}

static void retire_and_reopen(scene *s)
{
	EQUAL(WATCHED(shmq_store_retire(mine, soon())), 0);
	EQUAL(WATCHED(shmq_store_reopen(s->files->fd[store_serial(s)])), 0);
}

/* It is there with all keys, or it is gone. */
static void it_is_there_or_gone(scene *s)
{
	shmq_broker *b = attach(s, SHMQ_AS_SUPERVISOR);
	uint64_t serial;
	uint32_t index;
	int r = shmq_store_find(b, NAME, &index, &serial);

	if (r) {
		EQUAL(r, SHMQ_GONE);
		make_store(s, b);
		memset(fates(s), DONE, KEYS);
	} else {
		EQUAL(shmq_store_reopen(s->files->fd[serial]), 0);
	}
	the_store_is_whole(s);
}

static void ask_for_a_store(scene *s)
{
	uint32_t ticket;

	EQUAL(WATCHED(shmq_store_request(s->mine, NAME, KEYS, BYTES, soon(), &ticket)), 0);
	watch_begin();
	shmq_request_end(s->mine, ticket);
	watch_end();
}

/* ---- a death before ---- */

/* A client dies with the lock: a key is there twice, another one is half removed. */
static void somebody_died_in_the_store(scene *s)
{
	pid_t pid;
	int status;

	some_keys(s);
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		shmq_result_desc *e = (void *)((uint8_t *)store_of(s) + store_of(s)->entries_at);
		uint32_t idle = store_of(s)->free;

		CHECK(!pthread_mutex_lock(&store_of(s)->lock.mutex));
		for (uint32_t i = 0; i < 16; i++)
			if (e[i].word == 3) { /* key 2: its new value is stored, the old one is there still */
				uint8_t *arena = (uint8_t *)store_of(s) + store_of(s)->arena_at;

				e[idle] = e[i];
				e[idle].body = 8192 + 16;
				memcpy(arena + e[idle].body, arena + e[i].body, e[i].capacity);
				e[idle].word = 77;
			}
		raise(SIGKILL);
	}
	EQUAL(waitpid(pid, &status, 0), pid);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void get_after_a_death(scene *s)
{
	uint8_t buffer[LARGE];
	shmq_body key = key_of(1);
	uint64_t length;

	(void)s;
	EQUAL(WATCHED(shmq_store_get(mine, &key, false, soon(), buffer, sizeof(buffer), &length)), 0);
}

static void walk_after_a_death(scene *s)
{
	uint8_t buffer[4096];
	uint32_t bucket = 0;
	uint64_t used;
	bool more;

	(void)s;
	EQUAL(WATCHED(shmq_store_scan(mine, true, &bucket, &(shmq_store_room){buffer, sizeof(buffer)},
	                              soon(), &used, &more)),
	      0);
	CHECK(!more);
}

#define ALONE(words, before, come_, does, then)                                                    \
	{.name = words,                                                                                \
	 .channels = 1,                                                                                \
	 .prepare = before,                                                                            \
	 .ready = come_,                                                                               \
	 .act = does,                                                                                  \
	 .after = then,                                                                                \
	 .alone = true}

static const operation table[] = {
	ALONE("store a result", some_keys, come_and_open, set_new, the_store_is_whole),
	ALONE("replace a result", some_keys, come_and_open, replace, the_store_is_whole),
	ALONE("add a result in vain", some_keys, come_and_open, add_in_vain, the_store_is_whole),
	ALONE("store while the entries grow", sixteen_keys, come_and_open, set_new, the_store_is_whole),
	ALONE("store while the values grow", large_values, come_and_open, set_wide, the_store_is_whole),
	ALONE("replace in a full store", all_keys, come_and_open, replace_in_the_full_store,
	      the_store_is_whole),
	ALONE("store where some have expired", all_keys_and_three_have_expired, come_and_open,
	      set_where_some_have_expired, the_store_is_whole),
	ALONE("store after room was made", large_values_and_some_have_expired, come_and_open,
	      set_two_wide, the_store_is_whole),
	ALONE("take a result", some_keys, come_and_open, take_value, the_store_is_whole),
	ALONE("get an expired result", all_keys_and_three_have_expired, come_and_open, get_expired,
	      the_store_is_whole),
	ALONE("delete a result", some_keys, come_and_open, delete_one, the_store_is_whole),
	ALONE("count", some_keys_and_a_number, come_and_open, count_up, the_number_is_whole),
	{"store for a waiter", 1, some_keys_and_a_waiter, come_and_open, set_new, the_waiter_was_rung,
	 0, 0, 0},
	ALONE("wait for a result", some_keys, come_and_open, wait_in_vain, the_store_is_whole),
	ALONE("sweep a store", all_keys_and_three_have_expired, come_to_sweep, sweep,
	      the_store_is_whole),
	ALONE("give memory of a store back", much_was_in_it, come_to_sweep, trim, the_store_is_whole),
	ALONE("create a store", NULL, come_to_supervise, create, create_again),
	ALONE("remove a store", some_keys, come_to_sweep, retire_and_remove, it_is_there_or_gone),
	ALONE("open a store again", some_keys, come_to_sweep, retire_and_reopen, it_is_there_or_gone),
	{"ask for a store", 1, NULL, come, ask_for_a_store, no_request_is_left, 0, 0, 0},
	ALONE("get after a death in a store", somebody_died_in_the_store, come_and_open,
	      get_after_a_death, the_store_is_whole),
	ALONE("walk after a death in a store", somebody_died_in_the_store, come_and_open,
	      walk_after_a_death, the_store_is_whole),
};

const operations store_operations = {table, sizeof(table) / sizeof(table[0])};
