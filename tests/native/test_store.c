/* A results store against a table of the same keys; limits, time, garbage, deaths, waiting. */
#include "checker_store.h"
#include "harness.h"
#include "shmq_store.h"
#include "store/store_segment.h"
#include "store/store_table.h"

#include <signal.h>
#include <pthread.h>
#include <sched.h>

#define KEYS 200u
#define VALUE_MOST 3000u

static shmq_store *open_store(world *w, shmq_broker *b, const char *name)
{
	shmq_store *s = NULL;
	uint64_t serial;
	uint32_t store;

	EQUAL(shmq_store_find(b, name, &store, &serial), 0);
	EQUAL(shmq_store_open(b, store, serial, w->queues[serial], &s), 0);
	return s;
}

static shmq_store *make_store(world *w, const char *name, uint32_t max_keys, uint64_t max_bytes)
{
	shmq_store_spec spec = {.max_keys = max_keys, .max_bytes = max_bytes, .name = name};
	int fd = memfd_create("store", MFD_CLOEXEC);

	EQUAL(shmq_store_reserve(w->supervisor, soon(), &spec.store, &spec.serial), 0);
	w->queues[spec.serial] = fd;
	EQUAL(shmq_store_create(w->supervisor, fd, &spec), 0);
	EQUAL(shmq_store_enter(w->supervisor, &spec, soon()), 0);
	return open_store(w, w->supervisor, name);
}

#define SOUND_STORE(s)                                                                             \
	do {                                                                                           \
		const char *says_ = checker_store((s)->base);                                              \
		if (*says_) {                                                                              \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, says_);                             \
			abort();                                                                               \
		}                                                                                          \
	} while (0)

static shmq_body text(const char *words)
{
	return (shmq_body){words, strlen(words)};
}

static int set_text(shmq_store *s, const char *key, const char *value, int64_t ttl)
{
	shmq_body k = text(key), v = text(value);
	bool stored;

	return shmq_store_set(s, &k, &v, ttl, false, soon(), &stored);
}

static bool has_text(shmq_store *s, const char *key, const char *value)
{
	shmq_body k = text(key);
	uint64_t length;
	char buffer[256];
	int r = shmq_store_get(s, &k, false, soon(), buffer, sizeof(buffer), &length);

	if (r == SHMQ_EMPTY)
		return false;
	EQUAL(r, 0);
	return length == strlen(value) && !memcmp(buffer, value, length);
}

/* ---- a history ---- */

typedef struct expected {
	bool there[KEYS];
	uint32_t length[KEYS];
	uint8_t fill[KEYS];
} expected;

static uint32_t key_make(char *key, uint32_t k)
{
	return (uint32_t)sprintf(key, "key-%u-%.*s", k, (int)(k % 40),
	                         "........................................");
}

static void compare(shmq_store *s, const expected *x)
{
	uint8_t buffer[VALUE_MOST];
	uint32_t keys = 0;
	uint64_t length;
	char key[80];

	for (uint32_t k = 0; k < KEYS; k++) {
		shmq_body name = {key, key_make(key, k)};
		int r = shmq_store_get(s, &name, false, soon(), buffer, sizeof(buffer), &length);

		keys += x->there[k];
		EQUAL(r, x->there[k] ? 0 : SHMQ_EMPTY);
		if (r)
			continue;
		EQUAL(length, x->length[k]);
		for (uint64_t i = 0; i < length; i++)
			EQUAL(buffer[i], x->fill[k]);
	}
	EQUAL(s->d->keys, keys);
}

static void a_history_is_as_with_a_table(unsigned seed)
{
	world *w = world_start(small_limits(300, 300));
	shmq_store *s = make_store(w, "r", 150, 200000);
	expected x = {0};
	uint32_t there = 0;

	srand(seed);
	for (uint32_t step = 0; step < 20000; step++) {
		uint32_t k = (uint32_t)rand() % KEYS;
		uint8_t value[VALUE_MOST];
		char key[80];
		shmq_body name = {key, key_make(key, k)}, body = {value, (uint64_t)rand() % VALUE_MOST};
		bool absent = rand() % 4 == 0, done = false;
		int r;

		if (rand() % 3 == 0) {
			EQUAL(shmq_store_delete(s, &name, NULL, soon(), &done), 0);
			EQUAL(done, x.there[k]);
			there -= done;
			x.there[k] = false;
			continue;
		}
		memset(value, (int)step, body.length);
		r = shmq_store_set(s, &name, &body, INT64_MAX, absent, soon(), &done);
		if (r) {
			EQUAL(r, SHMQ_STORE_FULL);
			CHECK(there == 150 || s->d->bytes + body.length + 200 > 200000);
			continue;
		}
		EQUAL(done, !(absent && x.there[k]));
		if (!done)
			continue;
		there += !x.there[k];
		x.there[k] = true;
		x.length[k] = (uint32_t)body.length;
		x.fill[k] = (uint8_t)step;
		if (step % 500 == 0) {
			SOUND_STORE(s);
			compare(s, &x);
		}
		if (step % 5000 == 0) {
			EQUAL(store_lock(s, soon()), 0);
			EQUAL(store_rebuild(s), 0);
			store_unlock(s);
		}
	}
	SOUND_STORE(s);
	compare(s, &x);
	CHECK(s->d->refused > 0);
	shmq_store_close(s);
	world_stop(w);
}

/* ---- limits ---- */

static void bad_arguments_are_refused(void)
{
	world *w = world_start(small_limits(300, 300));
	shmq_store *s = make_store(w, "r", 10, 1 << 20);
	static char long_text[1 << 21];
	shmq_body none = {"", 0}, key = text("k"), long_key = {long_text, 256}, value = text("v");
	shmq_body long_value = {long_text, (1 << 20) + 1}, wide_value = {long_text, 1 << 20};
	uint32_t store;
	uint64_t serial;
	bool stored;

	EQUAL(shmq_store_set(s, &none, &value, INT64_MAX, false, soon(), &stored), SHMQ_INVALID);
	EQUAL(shmq_store_set(s, &long_key, &value, INT64_MAX, false, soon(), &stored), SHMQ_INVALID);
	EQUAL(shmq_store_set(s, &key, &value, 0, false, soon(), &stored), SHMQ_INVALID);
	EQUAL(shmq_store_set(s, &key, &value, -1, false, soon(), &stored), SHMQ_INVALID);
	EQUAL(shmq_store_set(s, &key, &long_value, 1, false, soon(), &stored), SHMQ_TOO_BIG);
	EQUAL(shmq_store_set(s, &key, &wide_value, 1, false, soon(), &stored), SHMQ_TOO_BIG);
	EQUAL(shmq_store_set(s, &key, &none, INT64_MAX, false, soon(), &stored), 0);
	CHECK(has_text(s, "k", ""));
	EQUAL(shmq_store_find(w->supervisor, "other", &store, &serial), SHMQ_GONE);
	EQUAL(shmq_store_limits_check(0, 1 << 20), SHMQ_INVALID);
	EQUAL(shmq_store_limits_check((1 << 24) + 1, 1 << 20), SHMQ_INVALID);
	EQUAL(shmq_store_limits_check(1, 65535), SHMQ_INVALID);
	shmq_store_close(s);
	world_stop(w);
}

static void a_full_store_replaces_and_takes_what_has_expired(void)
{
	world *w = world_start(small_limits(300, 300));
	shmq_store *s = make_store(w, "r", 4, 1 << 16);

	EQUAL(set_text(s, "a", "1", INT64_MAX), 0);
	EQUAL(set_text(s, "b", "1", INT64_MAX), 0);
	EQUAL(set_text(s, "c", "1", INT64_MAX), 0);
	EQUAL(set_text(s, "d", "1", 2 * NS_PER_MS), 0);
	if (s->d->next_expiry > shmq_now())
		EQUAL(set_text(s, "e", "1", INT64_MAX),
		      shmq_now() < s->d->next_expiry ? SHMQ_STORE_FULL : 0);
	EQUAL(set_text(s, "a", "2", INT64_MAX), 0);
	CHECK(has_text(s, "a", "2"));
	while (shmq_now() < s->d->next_expiry)
		sched_yield();
	EQUAL(set_text(s, "e", "1", INT64_MAX), 0);
	CHECK(!has_text(s, "d", "1"));
	EQUAL(s->d->keys, 4);
	EQUAL(set_text(s, "f", "1", INT64_MAX), SHMQ_STORE_FULL);
	SOUND_STORE(s);
	shmq_store_close(s);
	world_stop(w);
}

static void it_grows_to_its_limit(void)
{
	world *w = world_start(small_limits(300, 300));
	shmq_store *s = make_store(w, "r", 5000, 64 << 20), *other;
	char key[20];

	other = open_store(w, w->supervisor, "r");
	for (uint32_t i = 0; i < 5000; i++) {
		sprintf(key, "%u", i);
		EQUAL(set_text(i % 2 ? s : other, key, key, INT64_MAX), 0);
	}
	EQUAL(set_text(s, "one more", "", INT64_MAX), SHMQ_STORE_FULL);
	for (uint32_t i = 0; i < 5000; i++) {
		sprintf(key, "%u", i);
		CHECK(has_text(i % 2 ? other : s, key, key));
	}
	SOUND_STORE(s);
	shmq_store_close(other);
	shmq_store_close(s);
	world_stop(w);
}

/* ---- numbers ---- */

static void numbers_stay_in_their_bounds(void)
{
	world *w = world_start(small_limits(300, 300));
	shmq_store *s = make_store(w, "r", 10, 1 << 20);
	shmq_body n = text("n"), words = text("words");
	bool changed;
	int64_t value;

	EQUAL(shmq_store_incr(s, &n, &(shmq_store_step){5, INT64_MIN, INT64_MAX, INT64_MAX, false},
	                      soon(), &value, &changed),
	      0);
	EQUAL(value, 5);
	CHECK(changed && has_text(s, "n", "5"));
	EQUAL(shmq_store_incr(s, &n, &(shmq_store_step){2, 0, 6, INT64_MAX, false}, soon(), &value,
	                      &changed),
	      0);
	EQUAL(value, 5);
	CHECK(!changed);
	EQUAL(shmq_store_incr(s, &n, &(shmq_store_step){-6, 0, 6, INT64_MAX, false}, soon(), &value,
	                      &changed),
	      0);
	CHECK(!changed && value == 5);
	EQUAL(shmq_store_incr(s, &n, &(shmq_store_step){-12, INT64_MIN, 6, INT64_MAX, false}, soon(),
	                      &value, &changed),
	      0);
	CHECK(changed && value == -7 && has_text(s, "n", "-7"));
	EQUAL(set_text(s, "n", "9223372036854775807", INT64_MAX), 0);
	EQUAL(shmq_store_incr(s, &n, &(shmq_store_step){1, INT64_MIN, INT64_MAX, INT64_MAX, false},
	                      soon(), &value, &changed),
	      0);
	CHECK(!changed && value == INT64_MAX);
	EQUAL(set_text(s, "n", "-9223372036854775808", INT64_MAX), 0);
	EQUAL(shmq_store_incr(s, &n, &(shmq_store_step){-1, INT64_MIN, INT64_MAX, INT64_MAX, false},
	                      soon(), &value, &changed),
	      0);
	CHECK(!changed && value == INT64_MIN);
	for (const char **bad = (const char *[]){"", "-", "1x", "9223372036854775808", " 1", NULL};
	     *bad; bad++) {
		EQUAL(set_text(s, "words", *bad, INT64_MAX), 0);
		EQUAL(shmq_store_incr(s, &words, &(shmq_store_step){1, 0, 9, INT64_MAX, false}, soon(),
		                      &value, &changed),
		      SHMQ_NO_NUMBER);
		CHECK(has_text(s, "words", *bad));
	}
	SOUND_STORE(s);
	shmq_store_close(s);
	world_stop(w);
}

/* ---- time ---- */

static void a_sweep_removes_what_has_expired(void)
{
	world *w = world_start(small_limits(300, 300));
	shmq_store *s = make_store(w, "r", 1000, 1 << 20);
	uint32_t expired, total = 0;
	bool more;
	char key[20];

	for (uint32_t i = 0; i < 900; i++) {
		sprintf(key, "%u", i);
		EQUAL(set_text(s, key, key, i % 3 ? i % 2 ? 3600 * NS_PER_S : INT64_MAX : NS_PER_MS), 0);
	}
	EQUAL(shmq_store_sweep(s, shmq_now() - NS_PER_S, 100, soon(), &expired, &more), 0);
	CHECK(!expired && !more);
	do {
		EQUAL(shmq_store_sweep(s, shmq_now() + NS_PER_S, 100, soon(), &expired, &more), 0);
		total += expired;
	} while (more);
	EQUAL(total, 300);
	EQUAL(s->d->keys, 600);
	SOUND_STORE(s);
	CHECK(s->d->next_expiry > shmq_now() + 3000 * NS_PER_S && s->d->next_expiry < INT64_MAX);
	CHECK(!has_text(s, "0", "0") && has_text(s, "1", "1") && has_text(s, "2", "2"));
	shmq_store_close(s);
	world_stop(w);
}

/* ---- walking, memory ---- */

static void a_walk_returns_each_key_once(void)
{
	world *w = world_start(small_limits(300, 300));
	shmq_store *s = make_store(w, "r", 1000, 4 << 20);
	bool seen[500] = {0}, more = true;
	uint32_t bucket = 0, n = 0;
	char buffer[400], key[20];
	uint64_t used;

	for (uint32_t i = 0; i < 500; i++) {
		sprintf(key, "%u", i);
		EQUAL(set_text(s, key, key, i % 2 ? INT64_MAX : 3600 * NS_PER_S), 0);
	}
	EQUAL(shmq_store_scan(s, true, &bucket, &(shmq_store_room){buffer, 4}, soon(), &used, &more),
	      SHMQ_TOO_BIG);
	CHECK(used >= sizeof(shmq_store_record) + 2 && bucket < 1000);
	for (bucket = 0; more;) {
		EQUAL(shmq_store_scan(s, true, &bucket, &(shmq_store_room){buffer, sizeof(buffer)}, soon(),
		                      &used, &more),
		      0);
		for (uint64_t at = 0; at < used; n++) {
			shmq_store_record head;
			uint32_t number;

			memcpy(&head, buffer + at, sizeof(head));
			at += sizeof(head);
			EQUAL(head.key_length, head.length);
			CHECK(!memcmp(buffer + at, buffer + at + head.key_length, head.length));
			memcpy(key, buffer + at, head.key_length);
			key[head.key_length] = 0;
			number = (uint32_t)atoi(key);
			CHECK(number < 500 && !seen[number]);
			seen[number] = true;
			CHECK(number % 2 ? head.ttl == INT64_MAX : head.ttl > 0 && head.ttl <= 3600 * NS_PER_S);
			at += head.key_length + head.length;
		}
	}
	EQUAL(n, 500);
	shmq_store_close(s);
	world_stop(w);
}

static void a_trim_gives_memory_back_and_it_grows_again(void)
{
	world *w = world_start(small_limits(300, 300));
	shmq_store *s = make_store(w, "r", 1000, 64 << 20), *other = open_store(w, w->supervisor, "r");
	static char large[100000];
	shmq_body value = {large, sizeof(large)};
	uint64_t bytes;
	bool done;
	char key[20];

	for (uint32_t round = 0; round < 2; round++) {
		for (uint32_t i = 0; i < 100; i++) {
			shmq_body k = {key, (uint64_t)sprintf(key, "%u", i)};

			EQUAL(shmq_store_set(round ? other : s, &k, &value, INT64_MAX, false, soon(), &done),
			      0);
		}
		for (uint32_t i = 1; i < 100; i++) {
			shmq_body k = {key, (uint64_t)sprintf(key, "%u", i)};

			EQUAL(shmq_store_delete(s, &k, NULL, soon(), &done), 0);
		}
		EQUAL(shmq_store_trim(s, soon(), &bytes), 0);
		CHECK(bytes > 5 << 20);
		SOUND_STORE(s);
	}
	shmq_store_close(other);
	shmq_store_close(s);
	world_stop(w);
}

/* ---- deaths and garbage ---- */

/* A process dies with the lock, and all that is derived is garbage. */
static void a_death_under_the_lock_is_repaired(void)
{
	world *w = world_start(small_limits(300, 300));
	shmq_store *s = make_store(w, "r", 100, 1 << 20);
	char key[20];
	int status;
	pid_t pid;

	for (uint32_t i = 0; i < 70; i++) {
		sprintf(key, "%u", i);
		EQUAL(set_text(s, key, key, INT64_MAX), 0);
	}
	pid = fork();
	if (!pid) {
		shmq_store *mine = open_store(w, world_attach(w, SHMQ_AS_CLIENT), "r");

		EQUAL(store_lock(mine, soon()), 0);
		memset(mine->buckets, 0x55, 256);
		memset(&mine->d->arena, 0x33, sizeof(mine->d->arena));
		mine->d->free = 77;
		st(&mine->d->keys, 7);
		mine->entries[3].next = 99;
		raise(SIGKILL);
	}
	EQUAL(waitpid(pid, &status, 0), pid);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
	CHECK(has_text(s, "5", "5"));
	SOUND_STORE(s);
	EQUAL(s->d->keys, 70);
	shmq_store_close(s);
	world_stop(w);
}

/* Any word of the segment may be overwritten: no call hangs, and none leaves the mapping. */
static void garbage_does_no_harm(unsigned seed)
{
	world *w = world_start(small_limits(300, 300));

	srand(seed);
	for (uint32_t round = 0; round < 300; round++) {
		char name[20];
		shmq_store *s;
		bool more;

		sprintf(name, "r%u", round);
		s = make_store(w, name, 100, 1 << 16);
		for (uint32_t step = 0; step < 100; step++) {
			char key[20];
			shmq_body k = {key, (uint64_t)sprintf(key, "%d", rand() % 120)};
			uint64_t used, bytes;
			uint32_t expired, bucket = 0, at;
			int64_t value;
			char buffer[100];
			bool done;

			(void)set_text(s, key, "some value", INT64_MAX);
			(void)shmq_store_delete(s, &k, NULL, soon(), &done);
			(void)shmq_store_incr(s, &k, &(shmq_store_step){1, 0, 1000, INT64_MAX, false}, soon(),
			                      &value, &done);
			(void)shmq_store_get(s, &k, step % 2, soon(), buffer, sizeof(buffer), &used);
			(void)shmq_store_scan(s, true, &bucket, &(shmq_store_room){buffer, sizeof(buffer)},
			                      soon(), &used, &more);
			(void)shmq_store_sweep(s, shmq_now(), 30, soon(), &expired, &more);
			if (step == 50)
				(void)shmq_store_trim(s, soon(), &bytes);
			/* the header's words, buckets, entries, tags of blocks */
			at = (uint32_t)rand() % 4;
			at = at == 0   ? 448 + (uint32_t)rand() % 96
			     : at == 1 ? (uint32_t)s->d->buckets_at + (uint32_t)rand() % 512
			     : at == 2 ? (uint32_t)s->d->entries_at + (uint32_t)rand() % 4096
			               : (uint32_t)s->d->arena_at + (uint32_t)rand() % 4096;
			if (rand() % 2)
				s->base[at] = (uint8_t)rand();
			else
				*(uint32_t *)(void *)(s->base + at / 4 * 4) = (uint32_t)rand() % 200;
		}
		EQUAL(shmq_store_remove(w->supervisor, s->index, s->serial, soon()), 0);
		shmq_store_close(s);
	}
	world_stop(w);
}

/* A handle that has used nothing of a store compares its words with none of its own. */
static void a_new_handle_believes_no_words_of_0(void)
{
	world *w = world_start(small_limits(300, 300));
	shmq_store *s = make_store(w, "r", 100, 1 << 16), *fresh;

	EQUAL(set_text(s, "key", "value", INT64_MAX), 0);
	fresh = open_store(w, w->supervisor, "r");
	st(&s->d->entries_committed, 0);
	st(&s->d->arena_committed, 0);
	st(&s->d->dirty, 1);
	EQUAL(store_lock(fresh, soon()), SHMQ_CORRUPT);
	EQUAL(store_lock(s, soon()), SHMQ_CORRUPT);
	shmq_store_close(fresh);
	shmq_store_close(s);
	world_stop(w);
}

/* ---- waiting ---- */

typedef struct asker {
	shmq_store *s;
	const char *key, *value;
} asker;

static void *wait_for(void *argument)
{
	asker *a = argument;
	shmq_body key = text(a->key);
	uint32_t seen[SHMQ_STRIPES];
	int64_t deadline = soon();

	for (;;) {
		shmq_store_seen(a->s, seen);
		if (has_text(a->s, a->key, a->value))
			return NULL;
		EQUAL(shmq_store_wait(a->s, NULL, UINT64_C(1) << shmq_store_stripe(a->s, &key), seen,
		                      deadline),
		      0);
	}
}

static void a_set_wakes_who_waits_for_the_key(void)
{
	world *w = world_start(small_limits(300, 300));
	shmq_store *s = make_store(w, "r", 1000, 1 << 20);
	uint32_t seen[SHMQ_STRIPES];
	shmq_body key = text("0");
	pthread_t threads[4];
	asker askers[4];
	char keys[4][20];

	for (uint32_t round = 0; round < 200; round++) {
		for (int i = 0; i < 4; i++) {
			sprintf(keys[i], "%u-%d", round, i / 2);
			askers[i] = (asker){s, keys[i], "yes"};
			EQUAL(pthread_create(&threads[i], NULL, wait_for, &askers[i]), 0);
		}
		EQUAL(set_text(s, keys[0], "yes", INT64_MAX), 0);
		EQUAL(set_text(s, keys[2], "yes", INT64_MAX), 0);
		for (int i = 0; i < 4; i++)
			EQUAL(pthread_join(threads[i], NULL), 0);
	}
	shmq_store_seen(s, seen);
	EQUAL(shmq_store_wait(s, NULL, UINT64_C(1) << shmq_store_stripe(s, &key), seen,
	                      shmq_now() + NS_PER_MS),
	      SHMQ_TIMEOUT);
	EQUAL(shmq_store_retire(s, soon()), 0);
	EQUAL(shmq_store_wait(s, NULL, 1, seen, soon()), SHMQ_GONE);
	shmq_store_close(s);
	world_stop(w);
}

static void a_retired_store_is_gone_until_it_is_opened_again(void)
{
	world *w = world_start(small_limits(300, 300));
	shmq_store *s = make_store(w, "r", 10, 1 << 20), *other = open_store(w, w->supervisor, "r");
	uint32_t bucket = 0;
	uint64_t used;
	char buffer[100];
	shmq_store *third;
	bool more;

	EQUAL(set_text(s, "a", "1", INT64_MAX), 0);
	EQUAL(shmq_store_retire(s, soon()), 0);
	EQUAL(set_text(other, "a", "2", INT64_MAX), SHMQ_GONE);
	EQUAL(shmq_store_scan(s, true, &bucket, &(shmq_store_room){buffer, sizeof(buffer)}, soon(),
	                      &used, &more),
	      0);
	EQUAL(used, sizeof(shmq_store_record) + 2);
	EQUAL(shmq_store_open(w->supervisor, s->index, s->serial, w->queues[s->serial], &third),
	      SHMQ_GONE);
	EQUAL(shmq_store_reopen(w->queues[s->serial]), 0);
	EQUAL(shmq_store_open(w->supervisor, s->index, s->serial, w->queues[s->serial], &third), 0);
	CHECK(has_text(third, "a", "1"));
	EQUAL(set_text(other, "a", "2", INT64_MAX), 0);
	EQUAL(shmq_store_remove(w->supervisor, s->index, s->serial, soon()), 0);
	EQUAL(shmq_store_remove(w->supervisor, s->index, s->serial, soon()), SHMQ_GONE);
	shmq_store_close(third);
	shmq_store_close(other);
	shmq_store_close(s);
	world_stop(w);
}

static void full_tables_say_so(void)
{
	world *w = world_start(small_limits(300, 300));
	shmq_store_spec spec;
	char name[20];

	for (uint32_t i = 0; i < SHMQ_STORES; i++) {
		sprintf(name, "r%u", i);
		spec = (shmq_store_spec){.max_keys = 1, .max_bytes = 1 << 16, .name = name};
		EQUAL(shmq_store_reserve(w->supervisor, soon(), &spec.store, &spec.serial), 0);
		EQUAL(shmq_store_enter(w->supervisor, &spec, soon()), 0);
		EQUAL(shmq_store_enter(w->supervisor, &spec, soon()), SHMQ_INVALID);
	}
	EQUAL(shmq_store_reserve(w->supervisor, soon(), &spec.store, &spec.serial), SHMQ_TABLE_FULL);
	spec.name = "no good";
	EQUAL(shmq_store_enter(w->supervisor, &spec, soon()), SHMQ_BAD_NAME);
	world_stop(w);
}

int main(void)
{
	for (unsigned seed = 1; seed <= 3; seed++)
		a_history_is_as_with_a_table(seed);
	bad_arguments_are_refused();
	a_full_store_replaces_and_takes_what_has_expired();
	it_grows_to_its_limit();
	numbers_stay_in_their_bounds();
	a_sweep_removes_what_has_expired();
	a_walk_returns_each_key_once();
	a_trim_gives_memory_back_and_it_grows_again();
	a_death_under_the_lock_is_repaired();
	for (unsigned seed = 1; seed <= 3; seed++)
		garbage_does_no_harm(seed);
	a_new_handle_believes_no_words_of_0();
	a_set_wakes_who_waits_for_the_key();
	a_retired_store_is_gone_until_it_is_opened_again();
	full_tables_say_so();
	return 0;
}
