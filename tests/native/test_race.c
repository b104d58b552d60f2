/* Somebody writes where bodies are while they are used: what was checked is what is used, so
 * nothing outside the segment is touched. Garbage comes out, and errors; nothing else is asked
 * for. */
#include "harness.h"

#include <pthread.h>

#define WORLDS 30 /* a queue may be found broken for good */
#define ROUNDS 10000

static _Atomic bool over;
static shmq_map *victim;

/* Half of the time each slot and each free block points far outside. */
static void *scribble(void *unused)
{
	uint32_t n = ld(&victim->slots_backed);
	shmq_arena_desc *a = &victim->q->arena;

	while (!ld(&over))
		for (uint32_t i = 0; i < n; i++) {
			volatile uint64_t *body = &victim->slots[i].body;
			volatile uint64_t
					*head = &a->heads[i % SHMQ_ARENA_FL][i / SHMQ_ARENA_FL % SHMQ_ARENA_SL];
			uint64_t was = *body, first = *head;

			for (int k = 0; k < 4; k++) {
				*body = was ^ UINT64_C(1) << 44;
				*head = first ? first ^ UINT64_C(1) << 44 : 0;
				*body = was;
				*head = first;
			}
		}
	return unused;
}

/* Not given back: a broker that was found broken may not let go of its life lock. */
static struct {
	world *w;
	shmq_broker *b;
	shmq_producer *p;
	shmq_consumer *c;
} kept[WORLDS];

static void publish_and_take(int number)
{
	world *w = world_start(small_limits(300, 300));
	uint32_t generation, topic = world_topic(w, "t", &generation), queue, got;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	static uint8_t text[3000];
	uint64_t serial, id, published = 0;
	volatile uint64_t sum = 0;
	shmq_producer *p;
	shmq_consumer *c;
	shmq_message m[8];
	pthread_t thread;

	queue = world_queue(w, topic, "c", &serial);
	EQUAL(shmq_producer_open(b, topic, generation, &p), 0);
	EQUAL(world_publish(w, b, p, "x"), 0);
	c = world_consumer(w, b, queue, serial, 100);
	EQUAL(MAPPED(w, b, shmq_take(c, m, 1, soon(), &got)), 0);
	EQUAL(shmq_finish(c, m, 1, NULL, soon()), 0);
	victim = c->map;
	st(&over, false);
	EQUAL(pthread_create(&thread, NULL, scribble, NULL), 0);
	for (uint32_t i = 0; i < ROUNDS; i++) {
		shmq_body body = {text, 1 + i * 37 % sizeof(text)};

		published += shmq_publish(p, &body, 1, 0, shmq_now() + NS_PER_MS, &id) == 0;
		if (shmq_take(c, m, 8, shmq_now() + NS_PER_MS, &got))
			continue;
		for (uint32_t k = 0; k < got; k++)
			for (uint64_t at = 0; at < m[k].length; at += 64)
				sum += ((const volatile uint8_t *)m[k].body)[at];
		(void)shmq_finish(c, m, got, NULL, shmq_now() + NS_PER_MS);
	}
	st(&over, true);
	EQUAL(pthread_join(thread, NULL), 0);
	CHECK(published > 0);
	kept[number].w = w;
	kept[number].b = b;
	kept[number].p = p;
	kept[number].c = c;
}

int main(void)
{
	for (int i = 0; i < WORLDS; i++)
		publish_and_take(i);
	return 0;
}
