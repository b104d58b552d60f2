/* Slots from 128 to the most, the arena from 32 KiB, amid traffic: bodies stay whole. */
#include "harness.h"

#include <signal.h>

#define N 6000u

static uint32_t length_of(uint32_t number)
{
	static const uint32_t lengths[] = {20, 100, 63, 700, 48, 3000, 21, 1000};

	return lengths[number % 8];
}

static void fill(uint8_t *body, uint32_t number)
{
	memcpy(body, &number, 4);
	for (uint32_t i = 4; i < length_of(number); i++)
		body[i] = (uint8_t)(number * 31 + i);
}

static uint32_t check(const shmq_message *m)
{
	uint8_t expected[4096];
	uint32_t number;

	memcpy(&number, m->body, 4);
	EQUAL(m->length, length_of(number));
	fill(expected, number);
	CHECK(!memcmp(m->body, expected, m->length));
	return number;
}

static int publish(world *w, shmq_broker *b, shmq_producer *p, uint32_t first, uint32_t n)
{
	static uint8_t bodies[64][4096];
	shmq_body list[64];
	uint64_t id;

	for (uint32_t i = 0; i < n; i++) {
		fill(bodies[i], first + i);
		list[i] = (shmq_body){bodies[i], length_of(first + i)};
	}
	return MAPPED(w, b, shmq_publish(p, list, n, 0, soon(), &id));
}

static void a_queue_grows_under_traffic(uint32_t batch, uint32_t keep)
{
	world *w = world_start(small_limits(3000, 2000));
	uint32_t generation, topic = world_topic(w, "t", &generation), queue, next = 0, expected = 0,
						 got;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	uint32_t sizes = 0, slots = 0;
	uint64_t serial, bytes = 0, arenas = 0;
	shmq_message *m = malloc(keep * sizeof(*m));
	uint32_t held = 0;
	shmq_queue_desc *q;
	shmq_producer *p;
	shmq_consumer *c;

	queue = world_queue(w, topic, "c", &serial);
	EQUAL(shmq_producer_open(b, topic, generation, &p), 0);
	c = world_consumer(w, b, queue, serial, 100000);
	q = world_view(w, queue)->q;
	EQUAL(ld(&q->slots_committed), SHMQ_SLOTS_FIRST);
	EQUAL(ld(&q->arena_committed), SHMQ_ARENA_FIRST);
	while (next < N) {
		int r = publish(w, b, p, next, batch);

		if (r == SHMQ_FULL) {
			EQUAL(shmq_finish(c, m, held, NULL, soon()), 0);
			held = 0;
			while (!shmq_take(c, m, keep < 500 ? keep : 500, soon(), &got)) {
				for (uint32_t i = 0; i < got; i++)
					EQUAL(check(&m[i]), expected++);
				EQUAL(shmq_finish(c, m, got, NULL, soon()), 0);
			}
			continue;
		}
		EQUAL(r, 0);
		next += batch;
		if (next % 3 == 0 && held < keep) { /* some stay in flight while it grows */
			EQUAL(shmq_take(c, m + held, 1, soon(), &got), 0);
			EQUAL(check(&m[held]), expected++);
			held++;
		}
		if (ld(&q->slots_committed) != slots || ld(&q->arena_committed) != bytes) {
			sizes += ld(&q->slots_committed) != slots;
			arenas += ld(&q->arena_committed) != bytes;
			slots = ld(&q->slots_committed);
			bytes = ld(&q->arena_committed);
			SOUND(w);
			for (uint32_t i = 0; i < held; i++)
				(void)check(&m[i]);
		}
	}
	CHECK(sizes >= 5 && arenas >= 5);
	EQUAL(shmq_finish(c, m, held, NULL, soon()), 0);
	while (!shmq_take(c, m, keep, soon(), &got)) {
		for (uint32_t i = 0; i < got; i++)
			EQUAL(check(&m[i]), expected++);
		EQUAL(shmq_finish(c, m, got, NULL, soon()), 0);
	}
	EQUAL(expected, N);
	SOUND(w);
	free(m);
	world_leave(w, b, p, c);
	world_stop(w);
}

/* To the last slot; then full, not further. */
static void it_grows_to_its_limit_and_not_further(void)
{
	world *w = world_start(small_limits(1000, 500));
	uint32_t generation, topic = world_topic(w, "t", &generation), queue, n = 0, got;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	static shmq_message m[500];
	uint64_t serial;
	shmq_producer *p;
	shmq_consumer *c;

	queue = world_queue(w, topic, "c", &serial);
	EQUAL(shmq_producer_open(b, topic, generation, &p), 0);
	c = world_consumer(w, b, queue, serial, 100000);
	while (world_publish(w, b, p, "x") == 0)
		if (n++ < 500)
			EQUAL(shmq_take(c, m + n - 1, 1, soon(), &got), 0);
	EQUAL(n, 1500);
	EQUAL(ld(&world_view(w, queue)->q->slots_committed), 1500);
	EQUAL(world_publish(w, b, p, "x"), SHMQ_FULL);
	EQUAL(shmq_take(c, m, 1, soon(), &got), SHMQ_EMPTY); /* and its own budget is used up as well */
	SOUND(w);
	EQUAL(shmq_finish(c, m, 500, NULL, soon()), 0);
	SOUND(w);
	world_leave(w, b, p, c);
	world_stop(w);
}

/* Another process maps the queue while it has half grown: it is repaired, not refused. */
static void who_opens_it_half_grown_repairs_it(void)
{
	world *w = world_start(small_limits(1000, 500));
	uint32_t generation, topic = world_topic(w, "t", &generation), queue, got, returned;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT), *late;
	uint64_t serial;
	shmq_producer *p;
	shmq_consumer *c;
	shmq_message m;
	int status;
	pid_t pid;

	queue = world_queue(w, topic, "c", &serial);
	EQUAL(shmq_producer_open(b, topic, generation, &p), 0);
	for (uint32_t i = 0; i < 100; i++)
		EQUAL(publish(w, b, p, i, 1), 0);
	pid = fork();
	if (!pid) {
		shmq_broker *mine = world_attach(w, SHMQ_AS_CLIENT);
		shmq_map *map;

		EQUAL(MAPPED(w, mine, map_get(mine, queue, &map)), 0);
		EQUAL(both_lock(mine, map, soon()), 0);
		EQUAL(queue_commit_slots(map, 256), 0);
		st(&map->q->dirty, 1);
		st(&map->q->ring_mask, 255); /* and slots_committed is still 128 */
		raise(SIGKILL);
	}
	EQUAL(waitpid(pid, &status, 0), pid);
	late = world_attach(w, SHMQ_AS_CLIENT);
	c = world_consumer(w, late, queue, serial, 1000);
	for (uint32_t i = 0; i < 100; i++) {
		EQUAL(shmq_take(c, &m, 1, soon(), &got), 0);
		EQUAL(check(&m), i);
		EQUAL(shmq_finish(c, &m, 1, NULL, soon()), 0);
	}
	EQUAL(world_reap(w, w->supervisor, &returned), 1);
	SOUND(w);
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
	EQUAL(shmq_broker_detach(late, soon()), 0);
	shmq_broker_close(late);
	shmq_producer_close(p);
	EQUAL(shmq_broker_detach(b, soon()), 0);
	shmq_broker_close(b);
	world_stop(w);
}

static bool has_page(const shmq_map *map, uint32_t slot)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	uint64_t at = (uint64_t)((uint8_t *)&map->slots[slot] - map->base) / page * page;
	unsigned char there;

	EQUAL(mincore(map->base + at, page, &there), 0);
	return there & 1;
}

/* Their pages are there before D is asked for: consumers do not wait for pages. */
static void slots_get_their_pages_without_the_deliver_lock(void)
{
	world *w = world_start(small_limits(1000, 500));
	uint32_t generation, topic = world_topic(w, "t", &generation), queue, got;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	shmq_body body = {"x", 1};
	uint64_t serial, id;
	shmq_message m;
	shmq_producer *p;
	shmq_consumer *c;
	shmq_map *map;

	queue = world_queue(w, topic, "c", &serial);
	EQUAL(shmq_producer_open(b, topic, generation, &p), 0);
	c = world_consumer(w, b, queue, serial, 1000);
	for (uint32_t i = 0; i < SHMQ_SLOTS_FIRST; i++)
		EQUAL(world_publish(w, b, p, "x"), 0);
	map = world_view(w, queue);
	CHECK(!has_page(map, 2 * SHMQ_SLOTS_FIRST - 1));
	EQUAL(lock_take(&map->q->deliver, 0), 0);
	EQUAL(shmq_publish(p, &body, 1, 0, 0, &id), SHMQ_AGAIN);
	lock_drop(&map->q->deliver);
	CHECK(has_page(map, 2 * SHMQ_SLOTS_FIRST - 1));
	EQUAL(ld(&map->q->slots_committed), SHMQ_SLOTS_FIRST); /* nobody knows of them yet */
	SOUND(w);
	EQUAL(world_publish(w, b, p, "x"), 0);
	EQUAL(ld(&map->q->slots_committed), 2 * SHMQ_SLOTS_FIRST);
	for (uint32_t i = 0; i <= SHMQ_SLOTS_FIRST; i++) {
		EQUAL(shmq_take(c, &m, 1, soon(), &got), 0);
		EQUAL(shmq_finish(c, &m, 1, NULL, soon()), 0);
	}
	SOUND(w);
	world_leave(w, b, p, c);
	world_stop(w);
}

int main(void)
{
	slots_get_their_pages_without_the_deliver_lock();
	a_queue_grows_under_traffic(1, 1);
	a_queue_grows_under_traffic(1, 1500);
	a_queue_grows_under_traffic(12, 300);
	a_queue_grows_under_traffic(60, 1500);
	it_grows_to_its_limit_and_not_further();
	who_opens_it_half_grown_repairs_it();
	return 0;
}
