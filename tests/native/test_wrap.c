/* Every ring index a step before 2^32, then traffic across it. */
#include "harness.h"

static const uint32_t starts[] = {UINT32_MAX, UINT32_MAX - 1, UINT32_MAX - 127, UINT32_MAX - 500,
                                  (UINT32_C(1) << 31) - 3};

static void traffic(world *w, shmq_broker *b, shmq_producer *p, shmq_consumer *c, uint32_t queue)
{
	uint32_t got, expired, due, published = 0, finished = 0, expected = 0;
	shmq_message m[64];
	char text[32];

	for (int round = 0; round < 12; round++) {
		for (int i = 0; i < 60; i++) {
			snprintf(text, sizeof(text), "%u", published++);
			EQUAL(world_publish(w, b, p, text), 0);
		}
		EQUAL(shmq_take(c, m, 64, soon(), &got), 0);
		EQUAL(got, 60);
		for (uint32_t i = 0; i < got; i++) {
			snprintf(text, sizeof(text), "%u", expected++);
			CHECK(body_is(&m[i], text));
		}
		EQUAL(shmq_finish(c, m, 20, NULL, soon()), 0);
		EQUAL(shmq_requeue(c, m + 20, 20, 0, NULL, soon()), 0);
		EQUAL(shmq_requeue(c, m + 40, 20, NS_PER_S, NULL, soon()), 0);
		SOUND(w);
		if (round % 3 == 2)
			EQUAL(MAPPED(w, w->supervisor, shmq_rebuild(w->supervisor, queue, soon())), 0);
		EQUAL(shmq_expire(w->supervisor, queue,
		                  &(shmq_expiry){.realtime = INT64_MAX, .limit = 1000}, soon(), &expired,
		                  &due),
		      0);
		EQUAL(due, 20);
		EQUAL(shmq_take(c, m, 64, soon(), &got), 0);
		EQUAL(got, 40);
		EQUAL(shmq_finish(c, m, got, NULL, soon()), 0);
		finished += 60;
		EQUAL(finished, published);
		SOUND(w);
	}
}

static void deferred_publishes(world *w, shmq_broker *b, shmq_producer *p, shmq_consumer *c,
                               uint32_t queue)
{
	uint32_t expired, due, got;
	shmq_message m[64];
	shmq_body body = {"later", 5};
	uint64_t id;

	for (int round = 0; round < 12; round++) {
		for (int i = 0; i < 50; i++)
			EQUAL(MAPPED(w, b, shmq_publish(p, &body, 1, shmq_realtime() + NS_PER_S, soon(), &id)),
			      0);
		EQUAL(shmq_expire(w->supervisor, queue,
		                  &(shmq_expiry){.realtime = INT64_MAX, .limit = 1000}, soon(), &expired,
		                  &due),
		      0);
		EQUAL(due, 50);
		EQUAL(shmq_take(c, m, 64, soon(), &got), 0);
		EQUAL(got, 50);
		EQUAL(shmq_finish(c, m, got, NULL, soon()), 0);
		SOUND(w);
	}
}

static void a_ring_index_may_wrap(uint32_t start, uint32_t grow)
{
	world *w = world_start(small_limits(600, 300));
	uint32_t generation, topic = world_topic(w, "t", &generation), queue, n = 0, got;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	shmq_producer *p;
	shmq_consumer *c;
	shmq_map *map;
	uint64_t serial;
	shmq_message m[64];

	queue = world_queue(w, topic, "c", &serial);
	EQUAL(shmq_producer_open(b, topic, generation, &p), 0);
	map = world_view(w, queue);
	rings_move(map, start);
	SOUND(w);
	c = world_consumer(w, b, queue, serial, 1000);
	traffic(w, b, p, c, queue);
	deferred_publishes(w, b, p, c, queue);
	if (grow) { /* the rings change their size with indices near the end */
		while (world_publish(w, b, p, "x") == 0)
			n++;
		EQUAL(n, 600);
		SOUND(w);
		while (!shmq_take(c, m, 64, soon(), &got)) {
			n -= got;
			EQUAL(shmq_finish(c, m, got, NULL, soon()), 0);
		}
		EQUAL(n, 0);
		traffic(w, b, p, c, queue);
	}
	world_leave(w, b, p, c);
	world_stop(w);
}

int main(void)
{
	for (size_t i = 0; i < sizeof(starts) / sizeof(starts[0]); i++) {
		a_ring_index_may_wrap(starts[i], false);
		a_ring_index_may_wrap(starts[i], true);
	}
	return 0;
}
