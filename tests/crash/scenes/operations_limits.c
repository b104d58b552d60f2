/* Limits and times to live: publishes at a limit, and messages that are dropped or expire. */
#include "operations.h"

#include <stdlib.h>
#include <string.h>

static const shmq_settings blocks = {.max_messages = 6, .overflow = SHMQ_OVERFLOW_BLOCK};
static const shmq_settings rejects = {.max_messages = 5, .overflow = SHMQ_OVERFLOW_REJECT};
static const shmq_settings drops = {
	.max_messages = 4, .max_bytes = 4 * LARGE, .overflow = SHMQ_OVERFLOW_DROP_OLDEST};
static const shmq_settings skips = {.max_messages = 4, .overflow = SHMQ_OVERFLOW_DROP_NEWEST};
static const shmq_settings expires = {.message_ttl = 100 * SECOND};
static const shmq_settings kills = {.message_ttl = 100 * SECOND, .flags = SHMQ_EXPIRED_TO_DEAD};

static void set(scene *s, uint32_t q, const shmq_settings *settings)
{
	EQUAL(CALL(s, s->alive,
	           shmq_queue_configure(s->alive, s->ledger->queue[q].index, s->ledger->queue[q].serial,
	                                NULL, settings, soon())),
	      0);
}

static void first_blocks(scene *s)
{
	set(s, 0, &blocks);
}

static void second_rejects(scene *s)
{
	set(s, 1, &rejects);
}

static void first_drops(scene *s)
{
	set(s, 0, &drops);
}

static void first_skips(scene *s)
{
	set(s, 0, &skips);
}

static void publish_up_to_the_limit(scene *s)
{
	publish(s, s->mine, s->my_producer, 2, SMALL, 0);
	EQUAL(try_publish(s, s->mine, s->my_producer, 1, SMALL, 0), SHMQ_FULL);
}

static void come_and_reach_the_limit(scene *s)
{
	come(s);
	publish_up_to_the_limit(s);
}

static void wait_at_the_limit(scene *s)
{
	int r = WATCHED(shmq_producer_wait(s->my_producer, shmq_now()));

	CHECK(r == 0 || r == SHMQ_TIMEOUT);
}

static void publish_and_be_rejected(scene *s)
{
	EQUAL(try_publish(s, s->mine, s->my_producer, 2, SMALL, 0), SHMQ_REJECTED);
	publish(s, s->mine, s->my_producer, 1, SMALL, 0);
}

/* The fate, on queue 0, of the messages that make room. */
static void oldest_are(scene *s, uint32_t n, enum fate fate)
{
	memset(s->ledger->fate[0], (int)fate, n);
}

static void publish_over_the_oldest(scene *s)
{
	oldest_are(s, 2, EITHER);
	publish(s, s->mine, s->my_producer, 2, SMALL, 0);
	oldest_are(s, 2, DONE);
}

static void publish_large_over_the_oldest(scene *s)
{
	oldest_are(s, 1, EITHER);
	publish(s, s->mine, s->my_producer, 1, LARGE, 0);
	oldest_are(s, 1, DONE);
}

static void publish_past_one(scene *s)
{
	s->ledger->targets = 2;
	publish(s, s->mine, s->my_producer, 1, SMALL, 0);
}

/* It is empty soon. */
static void both_are_reached(scene *s)
{
	s->ledger->targets = 3;
}

/* Publish n messages that expire. */
static void publish_expiring(scene *s, shmq_broker *b, shmq_producer *p, uint32_t n, int64_t when)
{
	shmq_body bodies[MESSAGES];
	uint32_t first = s->ledger->next;
	uint64_t id;

	for (uint32_t i = 0; i < n; i++)
		bodies[i] = (shmq_body){body_make(first + i, SMALL), SMALL};
	set_fates(s, first, n, GROUP);
	s->ledger->next += n;
	EQUAL(CALL(s, b, shmq_publish_on(p, bodies, n, &(shmq_terms){.expires = when}, soon(), &id)),
	      0);
	set_fates(s, first, n, DUE);
	for (uint32_t i = 0; i < n; i++)
		free((void *)(uintptr_t)bodies[i].data);
}

static void publish_for_an_hour(scene *s)
{
	publish_expiring(s, s->mine, s->my_producer, 3, in_an_hour());
}

/* The messages of set_up are followed by three that have expired, then by two that have not. */
static void some_have_expired(scene *s)
{
	uint32_t first = s->ledger->next;

	publish_expiring(s, s->alive, s->producer, 3, 1);
	set_fates(s, first, 3, EITHER);
	publish(s, s->alive, s->producer, 2, SMALL, 0);
}

static void come_to_take(scene *s)
{
	s->mine = attach(s, SHMQ_AS_CLIENT);
	s->my_consumer = consume(s, s->mine, 0);
}

static void take_what_is_left(scene *s)
{
	s->ledger->takers++;
	EQUAL(WATCHED(shmq_take(s->my_consumer, s->m, 60, soon(), &s->got)), 0);
	EQUAL(s->got, 6);
	finish(s, 0, s->my_consumer, s->m, s->got);
}

/* Those in the middle of the requeue ring, too. */
static void some_have_expired_everywhere(scene *s)
{
	uint32_t got;
	shmq_message m[4];

	some_have_expired(s);
	s->consumer = consume(s, s->alive, 0);
	EQUAL(shmq_take(s->consumer, m, 2, soon(), &got), 0);
	EQUAL(shmq_requeue(s->consumer, m, 2, 0, NULL, soon()), 0);
	EQUAL(shmq_consumer_close(s->consumer, soon()), 0);
	set(s, 0, &expires);
}

/* The same with a dead topic, so that none is lost; and one that was requeued with a delay. */
static void some_die_of_age(scene *s)
{
	const uint8_t *base;
	shmq_slot_desc *slots;
	shmq_message m;
	uint32_t got;

	a_dead_topic(s);
	set(s, 0, &kills);
	s->consumer = consume(s, s->alive, 0);
	EQUAL(shmq_take(s->consumer, &m, 1, soon(), &got), 0);
	EQUAL(shmq_requeue(s->consumer, &m, 1, 100 * SECOND, NULL, soon()), 0);
	EQUAL(shmq_consumer_close(s->consumer, soon()), 0);
	base = (const void *)queue_of(s, 0);
	slots = (void *)(uintptr_t)(base + queue_of(s, 0)->slots_at);
	slots[m.slot].expires = 2;
	slots[m.slot].flags |= SHMQ_SLOT_EXPIRES;
	publish_expiring(s, s->alive, s->producer, 3, 2);
	publish(s, s->alive, s->producer, 2, SMALL, 0);
}

static void take_what_lives(scene *s)
{
	s->ledger->takers++;
	EQUAL(WATCHED(shmq_take(s->my_consumer, s->m, 60, soon(), &s->got)), 0);
	EQUAL(s->got, 5);
	finish(s, 0, s->my_consumer, s->m, s->got);
}

static uint32_t sweep_with(scene *s, shmq_broker *b)
{
	shmq_sweep sweep = {0};

	while (sweep.step != SHMQ_SWEPT)
		EQUAL(CALL(s, b, shmq_sweep_expired(b, first_queue(s), soon(), &sweep)), 0);
	return sweep.expired;
}

static void sweep(scene *s)
{
	EQUAL(sweep_with(s, s->mine), 3);
	for (uint32_t i = 4; i < 7; i++)
		s->ledger->fate[0][i] = DONE;
}

static void sweep_the_dying(scene *s)
{
	EQUAL(sweep_with(s, s->mine), 4);
}

/* However far it came, the next sweep ends it, and says when the one after it is due. */
static void sweep_again(scene *s)
{
	(void)sweep_with(s, s->home);
	EQUAL(sweep_with(s, s->home), 0);
	CHECK(queue_of(s, 0)->next_expiry < shmq_realtime() + 101 * SECOND);
	CHECK(queue_of(s, 0)->expired <= 3);
}

static void a_deferred_one_expires_later(scene *s)
{
	some_are_deferred(s);
	set(s, 0, &expires);
}

static void fall_due(scene *s)
{
	uint32_t expired, due;

	memset(s->ledger->due, 0, sizeof(s->ledger->due));
	EQUAL(WATCHED(shmq_expire(s->mine, first_queue(s),
	                          &(shmq_expiry){.now = 0, .realtime = INT64_MAX, .limit = 100}, soon(),
	                          &expired, &due)),
	      0);
	CHECK(due);
}

static const operation table[] = {
	{"publish up to a limit", 2, first_blocks, come, publish_up_to_the_limit, NULL, 0, 0, 0},
	{"wait at a limit", 1, first_blocks, come_and_reach_the_limit, wait_at_the_limit, NULL, 0, 0,
	 0},
	{"publish and be rejected", 3, second_rejects, come, publish_and_be_rejected, NULL, 0, 0, 0},
	{"publish over the oldest", 2, first_drops, come, publish_over_the_oldest, NULL, 0, 0, 0},
	{"publish a large body over the oldest", 2, first_drops, come, publish_large_over_the_oldest,
	 NULL, 0, 0, 0},
	{"publish past a full channel", 2, first_skips, come, publish_past_one, both_are_reached, 0, 0,
	 0},
	{"publish with a time to live", 2, NULL, come, publish_for_an_hour, NULL, 0, 0, 0},
	{"take past expired messages", 1, some_have_expired, come_to_take, take_what_is_left, NULL, 0,
	 0, 0},
	{"sweep", 1, some_have_expired_everywhere, come_to_supervise, sweep, sweep_again, 1, 1, 0},
	{"take past messages that die of age", 1, some_die_of_age, come_to_take, take_what_lives, NULL,
	 0, 1, 0},
	{"sweep messages that die of age", 1, some_die_of_age, come_to_supervise, sweep_the_dying, NULL,
	 1, 1, 0},
	{"fall due with a time to live", 1, a_deferred_one_expires_later, come_to_supervise, fall_due,
	 NULL, 1, 1, 0},
};

const operations limit_operations = {table, sizeof(table) / sizeof(table[0])};
