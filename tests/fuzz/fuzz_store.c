/*
 * A results store, overwritten in up to 15 words anywhere, and a program of calls. Input: how many
 * words, and in the highest bit whether the store is `repaired`; for each word its place (region,
 * word, value: 1, 2 and 4 bytes; the word's upper 2 bits: what the value is); then two bytes for
 * each call. Nothing may leave the segment, hang, or touch the store beside.
 *
 * Repaired: only words that a rebuild derives are overwritten, and the store is marked dirty, as by
 * a death. All keys must then have their values, and the store must be sound, also after the
 * program.
 */
#include "../native/checker_store.h"
#include "../native/scene.h"
#include "shmq_store.h"
#include "store/store_segment.h"

#define PER_WORD 7
#define CALLS 12
#define HOW_SHIFT 14
#define KEYS 40u
#define HAD 30u /* keys at the beginning */
#define BESIDE 10u
#define REPAIRED 0x80u

static scene s;
static world *w;
static shmq_store *store, *beside, fresh;
static uint8_t *derived; /* for each byte of the segment: 1 if a rebuild makes it */
static struct region {
	uint8_t *at;
	uint64_t bytes;
} regions[9];                  /* the first 7 are in the segment */
static bool at_work, repaired; /* the program runs; it runs on a store that must be right */

static int64_t shortly(void)
{
	return shmq_now() + 20 * NS_PER_MS;
}

/* Every status must be in the table; a store that was repaired has none of garbage. */
static int known(int r)
{
	CHECK(strcmp(shmq_status_name(r), "UNKNOWN"));
	CHECK(!repaired || (r != SHMQ_CORRUPT && r != SHMQ_GONE));
	return r;
}

static shmq_body key_of(char *text, uint32_t k)
{
	return (shmq_body){text, (uint64_t)sprintf(text, "key %u%*s", k, (int)(k % 5) * 9, "")};
}

static uint64_t value_of(uint8_t *value, uint32_t k)
{
	uint64_t length = k * 37 % 700;

	memset(value, (int)k + 1, length);
	return length;
}

static int put(shmq_store *to, uint32_t k, int64_t ttl)
{
	static uint8_t value[700];
	char text[80];
	shmq_body key = key_of(text, k), body = {value, value_of(value, k)};
	bool stored;

	return shmq_store_set(to, &key, &body, ttl, false, at_work ? shortly() : soon(), &stored);
}

static void has(shmq_store *from, uint32_t k)
{
	static uint8_t value[700], found[700];
	char text[80];
	shmq_body key = key_of(text, k);
	uint64_t length;

	EQUAL(shmq_store_get(from, &key, false, soon(), found, sizeof(found), &length), 0);
	EQUAL(length, value_of(value, k));
	CHECK(!memcmp(found, value, length));
}

static shmq_store *make(const char *name, uint32_t keys)
{
	shmq_store_spec spec = {.max_keys = KEYS, .max_bytes = 1 << 16, .name = name};
	int fd = memfd_create("store", MFD_CLOEXEC);
	shmq_store *made;

	EQUAL(shmq_store_reserve(w->supervisor, soon(), &spec.store, &spec.serial), 0);
	w->queues[spec.serial] = fd;
	EQUAL(shmq_store_create(w->supervisor, fd, &spec), 0);
	EQUAL(shmq_store_enter(w->supervisor, &spec, soon()), 0);
	EQUAL(shmq_store_open(s.b, spec.store, spec.serial, fd, &made), 0);
	for (uint32_t k = 0; k < keys; k++)
		EQUAL(put(made, k, k % 3 ? INT64_MAX : 3600 * NS_PER_S), 0);
	return made;
}

#define OF(first, behind) offsetof(shmq_store_desc, first), offsetof(shmq_store_desc, behind)

static void mark(uint64_t from, uint64_t to, int is_derived)
{
	memset(derived + from, is_derived, to - from);
}

static void find_derived(void)
{
	uint64_t entries = (uint64_t)((uint8_t *)store->entries - store->base);
	uint64_t arena = (uint64_t)(store->arena - store->base);

	derived = calloc(1, store->size);
	mark(OF(free, reserved1), 1);
	mark(OF(stored, reserved2), 1);
	mark(OF(arena, stripes), 1);
	mark(store->d->buckets_at, entries, 1);
	mark(arena, arena + ld(&store->d->arena_committed), 1);
	for (uint32_t i = 0; i < ld(&store->d->entries_committed); i++) {
		const shmq_result_desc *e = &store->entries[i];
		uint64_t at = entries + i * sizeof(*e), next = at + offsetof(shmq_result_desc, next);

		if (ld(&e->word)) {
			mark(next, next + 4, 1);
			mark(arena + e->body, arena + e->body + e->key_length + e->length, 0);
		} else {
			mark(at + 8, at + sizeof(*e), 1);
		}
	}
}

/* Each is met as often, whatever its size. */
static void find_regions(void)
{
	shmq_store_desc *d = store->d;
	struct region all[] = {
		{store->base, offsetof(shmq_store_desc, lock)},
		{store->base + offsetof(shmq_store_desc, dirty),
		 offsetof(shmq_store_desc, reserved2) - offsetof(shmq_store_desc, dirty)},
		{(uint8_t *)&d->arena, sizeof(d->arena)},
		{(uint8_t *)d->stripes, sizeof(d->stripes)},
		{(uint8_t *)store->buckets, 64 * sizeof(*store->buckets)},
		{(uint8_t *)store->entries, store->entries_max * sizeof(*store->entries)},
		{store->arena, store->arena_max},
		{(uint8_t *)s.b->stores, 2 * sizeof(*s.b->stores)},
		{(uint8_t *)s.b->waiters, 8 * sizeof(*s.b->waiters)},
	};

	_Static_assert(sizeof(all) == sizeof(regions), "regions");
	memcpy(regions, all, sizeof(all));
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	shmq_limits limits = scene_limits();
	uint32_t bell;

	(void)argc;
	(void)argv;
	scene_unmaps_every = 64;
	limits.max_msg_size = 2000;
	w = s.w = world_start(limits);
	s.b = world_attach(w, SHMQ_AS_CLIENT);
	store = make("r", HAD);
	beside = make("beside", BESIDE);
	find_derived();
	find_regions();
	fresh = *store;
	EQUAL(bell_get(s.b, &bell), 0);
	bell_put(s.b, bell);
	scene_part_add(&s, store->d, sizeof(*store->d));
	scene_part_add(&s, store->buckets, 64 * sizeof(*store->buckets));
	scene_part_add(&s, store->entries, store->entries_max * sizeof(*store->entries));
	EQUAL(segment_commit(store->base, (uint64_t)(store->arena - store->base), store->arena_max), 0);
	scene_part_add(&s, store->arena, store->arena_max);
	scene_part_add(&s, s.b->stores, 2 * sizeof(*s.b->stores));
	scene_part_add(&s, s.b->waiters, 8 * sizeof(*s.b->waiters));
	return 0;
}

/* ---- the program ---- */

static uint8_t buffer[1000];

static void set(uint32_t k)
{
	known(put(store, k % KEYS, k & 64 ? NS_PER_S : INT64_MAX));
}

static void add(uint32_t k)
{
	char text[80];
	shmq_body key = key_of(text, k % KEYS), body = {buffer, k};
	bool stored;

	known(shmq_store_set(store, &key, &body, 1, true, shortly(), &stored));
}

static void get(uint32_t k)
{
	char text[80];
	shmq_body key = key_of(text, k % KEYS);
	uint64_t length = 0, room = k & 64 ? 10 : sizeof(buffer);
	int r = known(shmq_store_get(store, &key, k & 128, shortly(), buffer, room, &length));

	CHECK(r || length <= room);
}

static void delete(uint32_t k)
{
	static uint8_t value[700];
	char text[80];
	shmq_body key = key_of(text, k % KEYS), body = {value, value_of(value, k % KEYS)};
	bool deleted;

	known(shmq_store_delete(store, &key, k & 64 ? &body : NULL, shortly(), &deleted));
}

static void count(uint32_t k)
{
	shmq_body key = {"number", 6};
	shmq_store_step step = {(int64_t)k - 9, -100, 1000, INT64_MAX, k % 2};
	int64_t value;
	bool changed;

	known(shmq_store_incr(store, &key, &step, shortly(), &value, &changed));
}

static void scan(uint32_t k)
{
	shmq_store_room room = {buffer, sizeof(buffer)};
	uint32_t bucket = k & 64 ? UINT32_MAX : 0;
	uint64_t used = 0;
	bool more = true;

	for (uint32_t step = 0; more && step < 2 * KEYS; step++) {
		if (known(shmq_store_scan(store, k & 1, &bucket, &room, shortly(), &used, &more)))
			return;
		CHECK(used <= sizeof(buffer));
	}
}

static void sweep(uint32_t k)
{
	int64_t now = shmq_now() + (k & 1 ? 0 : 2 * 3600 * NS_PER_S);
	uint32_t expired;
	bool more = true;

	for (uint32_t step = 0; more && step < 10; step++)
		if (known(shmq_store_sweep(store, now, k % 50, shortly(), &expired, &more)))
			return;
}

static void trim(uint32_t k)
{
	uint64_t bytes;

	(void)k;
	known(shmq_store_trim(store, shortly(), &bytes));
}

static void await(uint32_t k)
{
	uint32_t seen[SHMQ_STRIPES];

	shmq_store_seen(store, seen);
	known(shmq_store_wait(store, NULL, UINT64_C(1) << k % 64 | k, seen, 1));
}

static void look(uint32_t k)
{
	shmq_store_info info;
	uint64_t serial;
	uint32_t place;

	(void)k;
	shmq_store_get_info(store, &info);
	known(shmq_store_find(s.b, "beside", &place, &serial));
}

/* A process that comes later and believes nothing. */
static void another(uint32_t k)
{
	shmq_store *mine = store, *other;

	if (known(shmq_store_open(s.b, store->index, store->serial, w->queues[store->serial], &other)))
		return;
	store = other;
	get(k);
	scan(1);
	set(k);
	store = mine;
	shmq_store_close(other);
}

static void (*const calls[])(uint32_t) = {set,   add,  get,   delete, count,  scan,
                                          sweep, trim, await, look,   another};

/* `how` says what it is: any number, a small one, what is there changed a little, what stands
 * elsewhere. Not in the lock: one that looks held is waited for, rightly. */
static void overwrite(const uint8_t *word)
{
	const struct region *region = &regions[word[0] % (repaired ? 7 : 9)];
	uint32_t place = (uint32_t)(word[1] | word[2] << 8), value, there;
	uint8_t *to = region->at + 4 * (place % (1u << HOW_SHIFT) % (region->bytes / 4));

	if (repaired && !derived[to - store->base])
		return;
	memcpy(&value, word + 3, sizeof(value));
	memcpy(&there, to, sizeof(there));
	if (place >> HOW_SHIFT == 1)
		value %= 256;
	else if (place >> HOW_SHIFT == 2)
		value = there + (uint32_t)(int8_t)value;
	else if (place >> HOW_SHIFT == 3)
		memcpy(&value, region->at + 4 * (value % (region->bytes / 4)), sizeof(value));
	memcpy(to, &value, sizeof(value));
}

static void must_be_sound(void)
{
	const char *says = checker_store(store->base);

	if (*says)
		fprintf(stderr, "%s\n", says);
	CHECK(!*says);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	size_t words, at = 1;

	if (!size)
		return 0;
	for (uint32_t i = 0; i < s.parts_count; i++)
		memcpy(s.parts[i].at, s.parts[i].copy, s.parts[i].bytes);
	*store = fresh;
	repaired = data[0] & REPAIRED;
	words = data[0] % 16;
	for (size_t i = 0; i < words && size - at >= PER_WORD; i++, at += PER_WORD)
		overwrite(data + at);
	if (repaired) {
		st(&store->d->dirty, 1);
		for (uint32_t k = 0; k < HAD; k++)
			has(store, k);
		must_be_sound();
	}
	at_work = true;
	for (size_t n = 0; size - at >= 2 && n < CALLS; at += 2, n++)
		calls[data[at] % (sizeof(calls) / sizeof(calls[0]))](data[at + 1]);
	at_work = false;
	if (repaired)
		must_be_sound();
	repaired = false;
	for (uint32_t k = 0; k < BESIDE; k++)
		has(beside, k);
	return 0;
}
