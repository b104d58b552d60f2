/* Plays: publishes at a limit, messages that are dropped, that expire, and that are swept. */
#include "stage.h"

static const shmq_settings rejects = {.max_messages = 3, .overflow = SHMQ_OVERFLOW_REJECT};
static const shmq_settings drops = {
	.max_messages = 2, .max_bytes = 3 * BODY, .overflow = SHMQ_OVERFLOW_DROP_OLDEST};
static const shmq_settings blocks = {
	.max_messages = 2, .max_bytes = 2 * BODY, .overflow = SHMQ_OVERFLOW_BLOCK};
static const shmq_settings endless;

static void configure(const shmq_settings *settings)
{
	EQUAL(MAPPED(k->w, k->w->supervisor,
	             shmq_queue_configure(k->w->supervisor, k->queue[0], k->serial[0], NULL, settings,
	                                  soon())),
	      0);
}

static void begin_full(const shmq_settings *settings)
{
	begin(1);
	configure(settings);
	publish(EARLY, 2, 0);
	come_to_publish(0);
	come_to_take(1, 0);
}

static void begin_dropping(void)
{
	begin_full(&drops);
	k->dropped[0] = true;
}

static void begin_rejecting(void)
{
	begin_full(&rejects);
	come_to_publish(2);
}

static void begin_blocking(void)
{
	begin_full(&blocks);
}

/* Publish one, and wait at the limit as the binding does. */
static void publish_and_wait_0(void)
{
	actor *a = &k->actors[0];
	uint32_t number = a->next++;
	uint8_t data[BODY];
	shmq_body body = {data, BODY};
	uint64_t id;
	int r;

	body_make(data, number);
	k->published[number] = BEGUN;
	k->group[number] = (uint8_t)number;
	r = MAPPED(k->w, a->b, shmq_publish(a->p, &body, 1, 0, soon(), &id));
	for (uint32_t tries = 0; r == SHMQ_FULL && tries < 3; tries++) { /* nobody reaps a dead taker */
		(void)shmq_producer_wait(a->p, soon());
		r = MAPPED(k->w, a->b, shmq_publish(a->p, &body, 1, 0, soon(), &id));
	}
	CHECK(!r || r == SHMQ_FULL);
	k->published[number] = r ? REFUSED : RETURNED;
}

static void publish_one_2(void)
{
	publish(2, 1, 0);
}

static void configure_3(void)
{
	int r = MAPPED(k->w, k->actors[3].b,
	               shmq_queue_configure(k->actors[3].b, k->queue[0], k->serial[0], NULL, &endless,
	                                    soon()));

	EQUAL(r, 0);
}

static void begin_configuring(void)
{
	begin_dropping();
	come_to_supervise(3);
}

/* Two messages that have expired between two that have not. */
static void begin_expired(void)
{
	actor *a;
	uint32_t first;
	uint64_t id;

	begin(1);
	a = &k->actors[EARLY];
	publish(EARLY, 1, 0);
	first = EARLY * EACH + a->next;
	a->next += 2;
	for (uint32_t i = 0; i < 2; i++) {
		uint8_t data[BODY];
		shmq_body body = {data, BODY};

		body_make(data, first + i);
		EQUAL(shmq_publish_on(a->p, &body, 1, &(shmq_terms){.expires = 1}, soon(), &id), 0);
		k->published[first + i] = BEGUN; /* it is there or gone, and never delivered */
		k->group[first + i] = (uint8_t)(first + i);
		k->finished[0][first + i] = TAKEN;
	}
	publish(EARLY, 1, 0);
	k->dropped[0] = true;
	come_to_publish(0);
	come_to_take(1, 0);
	come_to_supervise(3);
}

static void sweep_3(void)
{
	shmq_sweep sweep = {0};

	while (sweep.step != SHMQ_SWEPT)
		EQUAL(MAPPED(k->w, k->actors[3].b,
		             shmq_sweep_expired(k->actors[3].b, k->queue[0], soon(), &sweep)),
		      0);
	CHECK(sweep.expired <= 2);
}

static const play table[] = {
	/* the actors: 0 publishes, 1 takes, 2 publishes, 3 supervises */
	PLAY("publish over the oldest, take", begin_dropping, publish_batch_0, take_two_1),
	PLAY("publish over the oldest, take, configure", begin_configuring, publish_one_0, take_one_1,
	     NULL, configure_3),
	PLAY("publish up to a limit, take, publish", begin_rejecting, publish_one_0, take_one_1,
	     publish_one_2),
	PLAY("publish and wait at a limit, take", begin_blocking, publish_and_wait_0, take_one_1),
	PLAY("publish, take, sweep", begin_expired, publish_one_0, take_one_1, NULL, sweep_3),
};

const plays limit_plays = {table, sizeof(table) / sizeof(table[0])};
