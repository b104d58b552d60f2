/* The recount itself: it says nothing of a sound queue and finds each seeded fault. */
#include "harness.h"

typedef struct stage {
	world *w;
	shmq_broker *b;
	shmq_map *map;
	shmq_producer *p;
	shmq_consumer *c;
} stage;

/* A queue with something in every ring and heap. */
static stage setup(void)
{
	stage x = {.w = world_start(small_limits(300, 300))};
	uint32_t generation, topic = world_topic(x.w, "t", &generation), queue, moved, got, expired,
						 due;
	shmq_body later = {"later", 5};
	shmq_message m[12];
	uint64_t serial, id;

	queue = world_queue(x.w, topic, "c", &serial);
	x.b = world_attach(x.w, SHMQ_AS_CLIENT);
	EQUAL(shmq_producer_open(x.b, topic, generation, &x.p), 0);
	x.c = world_consumer(x.w, x.b, queue, serial, 1000);
	for (int i = 0; i < 40; i++)
		EQUAL(world_publish(x.w, x.b, x.p, "message"), 0);
	EQUAL(shmq_take(x.c, m, 12, soon(), &got), 0);
	EQUAL(shmq_requeue(x.c, m, 3, 0, NULL, soon()), 0);
	EQUAL(shmq_requeue(x.c, m + 3, 3, NS_PER_S, NULL, soon()), 0);
	EQUAL(shmq_pin(x.c, m + 6, soon()), 0);
	EQUAL(shmq_finish(x.c, m + 6, 2, NULL, soon()), 0);
	EQUAL(shmq_publish(x.p, &later, 1, shmq_realtime() + NS_PER_S, soon(), &id), 0);
	EQUAL(shmq_expire(x.w->supervisor, queue, &(shmq_expiry){.limit = 10}, soon(), &expired, &due),
	      0);
	EQUAL(MAPPED(x.w, x.w->supervisor,
	             shmq_stage_oldest(x.w->supervisor, queue, 2, soon(), &moved)),
	      0);
	EQUAL(shmq_publish(x.p, &later, 1, shmq_realtime() + NS_PER_S, soon(), &id), 0);
	x.map = world_view(x.w, queue);
	return x;
}

static const char *says(stage *x)
{
	return checker_queue(x->w->supervisor->base, x->map->base);
}

/* Seed a fault, see it found, take it out again. */
#define FOUND(x, words, plant, undo)                                                               \
	do {                                                                                           \
		const char *says_;                                                                         \
		plant;                                                                                     \
		says_ = says(x);                                                                           \
		if (!strstr(says_, words)) {                                                               \
			fprintf(stderr, "%s:%d: it says '%s'\n", __FILE__, __LINE__, says_);                   \
			abort();                                                                               \
		}                                                                                          \
		undo;                                                                                      \
		CHECK(!*says(x));                                                                          \
	} while (0)

static void a_sound_queue_is_sound(stage *x)
{
	CHECK(!*says(x));
}

static void rings_are_counted(stage *x)
{
	shmq_queue_desc *q = x->map->q;
	uint32_t mask = ld(&q->ring_mask), *first = &x->map->ready[ld(&q->ready_head) & mask];
	uint32_t *second = &x->map->ready[(ld(&q->ready_head) + 1) & mask], a = *first, b = *second;
	uint32_t *none = &x->map->free[(ld(&q->free_tail) - 1) & mask], f = *none;
	uint32_t *back = &x->map->requeue[ld(&q->requeue_head) & mask], k = *back;

	FOUND(x, "is in nowhere", bump(&q->free_tail, UINT32_MAX);
	      q->free_tail_cached = ld(&q->free_tail), bump(&q->free_tail, 1));
	FOUND(x, "is in the ready ring and in the ready ring", *second = a, *second = b);
	FOUND(x, "is in the ready ring and in the free ring", *none = a, *none = f);
	FOUND(x, "is in the ready ring and in the requeue ring", *back = a, *back = k);
	FOUND(x, "comes behind", (*first = b, *second = a), (*first = a, *second = b));
	FOUND(x, "holds slot", *none = 100000, *none = f);
	FOUND(x, "has state",
	      st(&x->map->slots[f].word, word_next(ld(&x->map->slots[f].word), SHMQ_READY)),
	      st(&x->map->slots[f].word, word_next(ld(&x->map->slots[f].word), SHMQ_FREE)));
	FOUND(x, "undecided",
	      st(&x->map->slots[f].word, word_next(ld(&x->map->slots[f].word), SHMQ_PREPARED)),
	      st(&x->map->slots[f].word, word_next(ld(&x->map->slots[f].word), SHMQ_FREE)));
	FOUND(x, "it is dirty", st(&q->dirty, 1), st(&q->dirty, 0));
}

static void counters_are_recounted(stage *x)
{
	shmq_queue_desc *q = x->map->q;
	shmq_session_desc *session = x->map->sessions;

	FOUND(x, "held is", bump(&q->in_use, 1), bump(&q->in_use, UINT32_MAX));
	FOUND(x, "in_use_bytes is", bump(&q->in_use_bytes, 1), bump(&q->in_use_bytes, UINT64_MAX));
	FOUND(x, "is in nowhere", bump(&q->in_flight_len, UINT32_MAX), bump(&q->in_flight_len, 1));
	FOUND(x, "is in nowhere", bump(&q->deferred_len, UINT32_MAX), bump(&q->deferred_len, 1));
	FOUND(x, "spilling_count is", bump(&q->spilling_count, 1),
	      bump(&q->spilling_count, UINT32_MAX));
	FOUND(x, "in flight, counted", bump(&session->in_flight, 1),
	      bump(&session->in_flight, UINT32_MAX));
}

static void heaps_are_walked(stage *x)
{
	heap *h = &x->map->in_flight;
	int64_t when = h->when[0];
	uint32_t slot = h->slot[0];

	FOUND(x, "earlier than its parent",
	      (h->when[0] += NS_PER_S * 1000, x->map->slots[slot].deadline = h->when[0]),
	      (h->when[0] = when, x->map->slots[slot].deadline = when));
	FOUND(x, "another time", x->map->slots[slot].deadline--, x->map->slots[slot].deadline++);
	FOUND(x, "thinks it is at", x->map->slots[slot].heap = 3, x->map->slots[slot].heap = 0);
	FOUND(x, "times out before next_deadline", st(&x->b->next_deadline[x->map->index], INT64_MAX),
	      st(&x->b->next_deadline[x->map->index], when));
	FOUND(x, "is due before next_due", st(&x->b->next_due[x->map->index], INT64_MAX),
	      st(&x->b->next_due[x->map->index], 0));
}

static void bodies_are_laid_side_by_side(stage *x)
{
	shmq_queue_desc *q = x->map->q;
	uint32_t mask = ld(&q->ring_mask);
	shmq_slot_desc *a = &x->map->slots[x->map->ready[ld(&q->ready_head) & mask]];
	shmq_slot_desc *b = &x->map->slots[x->map->ready[(ld(&q->ready_head) + 1) & mask]];
	uint64_t body = a->body, *tag = (uint64_t *)(void *)(x->map->arena + body - 16);

	FOUND(x, "overlap", a->body = b->body, a->body = body);
	FOUND(x, "lies outside", a->body = ld(&q->arena_committed), a->body = body);
	FOUND(x, "bytes in a block of", a->length += 1000, a->length -= 1000);
	FOUND(x, "nobody's", *tag += 64, *tag -= 64);
	FOUND(x, "impossible size", *tag = 0, *tag = a->capacity + 16 + 1);
	FOUND(x, "does not know the one before", tag[1]++, tag[1]--);
	FOUND(x, "bytes are free", q->arena.free_bytes++, q->arena.free_bytes--);
	FOUND(x, "nobody's", a->capacity = 0; a->length = 0, a->capacity = 48; a->length = 7);
	{
		uint64_t heads[SHMQ_ARENA_FL][SHMQ_ARENA_SL];

		memcpy(heads, q->arena.heads, sizeof(heads));
		FOUND(x, "are listed", memset(q->arena.heads, 0, sizeof(heads)),
		      memcpy(q->arena.heads, heads, sizeof(heads)));
	}
}

static void owners_and_pins_are_looked_up(stage *x)
{
	shmq_client_desc *client = &x->b->clients[x->b->client];
	shmq_slot_desc *flying = &x->map->slots[x->map->in_flight.slot[0]];
	uint64_t word = ld(&flying->word), pin = ld(&client->pins[0]);
	uint64_t touched = ld(&client->touched[0]);

	FOUND(x, "has not touched", st(&client->touched[0], 0), st(&client->touched[0], touched));
	FOUND(x, "which is not there", st(&flying->word, word | 0xff00), st(&flying->word, word));
	FOUND(x, "pins, the logs say", st(&client->pins[0], 0), st(&client->pins[0], pin));
	FOUND(x, "without a pin", st(&client->pins[0], 0);
	      x->map->slots[pin & 0xffffff].pins = 0, st(&client->pins[0], pin);
	      x->map->slots[pin & 0xffffff].pins = 1);
	FOUND(x, "to session", flying->session = 7, flying->session = 0);
}

int main(void)
{
	stage x = setup();

	a_sound_queue_is_sound(&x);
	rings_are_counted(&x);
	counters_are_recounted(&x);
	heaps_are_walked(&x);
	bodies_are_laid_side_by_side(&x);
	owners_and_pins_are_looked_up(&x);
	EQUAL(MAPPED(x.w, x.w->supervisor, shmq_rebuild(x.w->supervisor, x.map->index, soon())), 0);
	a_sound_queue_is_sound(&x);
	world_leave(x.w, x.b, x.p, x.c);
	world_stop(x.w);
	return 0;
}
