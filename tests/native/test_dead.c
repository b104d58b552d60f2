/* Failures, convictions, suspects, retry delays, and the move to a dead topic and back. */
#include "harness.h"

#include <sys/wait.h>
#include <unistd.h>

typedef struct bench {
	world *w;
	shmq_broker *b;
	uint32_t topic, generation, queue, dead_queue;
	uint64_t serial, dead_serial;
	shmq_dead_target dead;
	shmq_producer *p;
	shmq_consumer *c;
} bench;

static void configure(bench *x, shmq_settings settings)
{
	EQUAL(MAPPED(x->w, x->b,
	             shmq_queue_configure(x->b, x->queue, x->serial, NULL, &settings, soon())),
	      0);
}

static bench setup(shmq_settings settings)
{
	bench x = {.w = world_start(small_limits(1000, 1000))};

	x.topic = world_topic(x.w, "t", &x.generation);
	x.dead.topic = world_topic(x.w, "t.c.dead", &x.dead.generation);
	x.queue = world_queue(x.w, x.topic, "c", &x.serial);
	x.dead_queue = world_queue(x.w, x.dead.topic, "dead", &x.dead_serial);
	x.b = world_attach(x.w, SHMQ_AS_CLIENT);
	EQUAL(shmq_producer_open(x.b, x.topic, x.generation, &x.p), 0);
	configure(&x, settings);
	x.c = world_consumer(x.w, x.b, x.queue, x.serial, 100000);
	return x;
}

static void teardown(bench x)
{
	SOUND(x.w);
	EQUAL(shmq_consumer_close(x.c, soon()), 0);
	shmq_consumer_free(x.c);
	shmq_producer_close(x.p);
	EQUAL(MAPPED(x.w, x.b, shmq_broker_detach(x.b, soon())), 0);
	shmq_broker_close(x.b);
	world_stop(x.w);
}

static void publish(bench *x, uint32_t n)
{
	char text[16];

	for (uint32_t i = 0; i < n; i++) {
		snprintf(text, sizeof(text), "%u", i);
		EQUAL(world_publish(x->w, x->b, x->p, text), 0);
	}
}

static shmq_message take(bench *x)
{
	shmq_message m;
	uint32_t got;

	EQUAL(shmq_take(x->c, &m, 1, soon(), &got), 0);
	return m;
}

static bool nothing_to_take(bench *x)
{
	shmq_message m;
	uint32_t got;

	return shmq_take(x->c, &m, 1, soon(), &got) == SHMQ_EMPTY;
}

static const shmq_slot_desc *slot_of(bench *x, const shmq_message *m)
{
	return &world_view(x->w, x->queue)->slots[m->slot];
}

static uint32_t failures(bench *x, const shmq_message *m)
{
	const shmq_slot_desc *s = slot_of(x, m);

	return s->flags & SHMQ_SLOT_FAILED ? ld(&s->failures) >> 16 : 0;
}

static void scan(bench *x, int64_t now, int64_t realtime)
{
	uint32_t expired, due;

	EQUAL(MAPPED(x->w, x->w->supervisor,
	             shmq_expire(x->w->supervisor, x->queue,
	                         &(shmq_expiry){.now = now, .realtime = realtime, .limit = 1000},
	                         soon(), &expired, &due)),
	      0);
}

/* As the supervisor does after its scan. Returns how many were moved. */
static uint32_t move_the_dead(bench *x)
{
	uint32_t moved;
	int r = MAPPED(x->w, x->w->supervisor,
	               shmq_dead_move(x->w->supervisor, x->queue, x->serial, &x->dead,
	                              &(shmq_dead_wish){.n = 1000}, soon(), &moved));

	CHECK(r == 0 || r == SHMQ_EMPTY);
	SOUND(x->w);
	return moved;
}

/* Take what is in the dead topic; the last message. Returns how many there were. */
static uint32_t bury(bench *x, shmq_message *last)
{
	shmq_consumer *c = world_consumer(x->w, x->b, x->dead_queue, x->dead_serial, 1000);
	uint32_t got, n = 0;

	while (!shmq_take(c, last, 1, soon(), &got)) {
		EQUAL(shmq_finish(c, last, 1, NULL, soon()), 0);
		n++;
	}
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
	return n;
}

/* A client takes n messages, of which each take may bring fewer, and dies with those of the last
 * take. Returns how many that were. */
static uint32_t die_with(bench *x, uint32_t n)
{
	uint32_t returned;
	int status;
	pid_t child = fork();

	if (!child) {
		shmq_broker *b = world_attach(x->w, SHMQ_AS_CLIENT);
		shmq_consumer *c = world_consumer(x->w, b, x->queue, x->serial, 1000);
		shmq_message m[64];
		uint32_t got = 0;

		_exit(shmq_take(c, m, n, soon(), &got) ? 0 : (int)got);
	}
	CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
	EQUAL(world_reap(x->w, x->w->supervisor, &returned), 1);
	EQUAL(returned, (uint32_t)WEXITSTATUS(status));
	SOUND(x->w);
	return returned;
}

#define STRICT (shmq_settings){.max_attempts = 3}

static void requeues_count_and_the_last_convicts(void)
{
	bench x = setup(STRICT);
	shmq_message m, buried;

	publish(&x, 1);
	for (uint32_t i = 0; i < 3; i++) {
		m = take(&x);
		EQUAL(failures(&x, &m), i);
		EQUAL(shmq_requeue(x.c, &m, 1, 0, NULL, soon()), 0);
	}
	CHECK(nothing_to_take(&x));
	EQUAL(slot_of(&x, &m)->flags >> SHMQ_SLOT_REASON_SHIFT, SHMQ_DEAD_ATTEMPTS);
	CHECK(!shmq_dead_waiting(x.b, x.queue) || ld(&x.b->next_due[x.queue]) == SHMQ_DUE_CONVICTED);
	scan(&x, 0, shmq_realtime());
	CHECK(shmq_dead_waiting(x.b, x.queue));
	EQUAL(move_the_dead(&x), 1);
	CHECK(!shmq_dead_waiting(x.b, x.queue));
	EQUAL(bury(&x, &buried), 1);
	EQUAL(buried.id, m.id);
	EQUAL(buried.timestamp, m.timestamp);
	EQUAL(buried.attempts, 4); /* this one included */
	CHECK(body_is(&buried, "0"));
	EQUAL(ld(&world_view(x.w, x.queue)->q->dead_lettered), 1);
	teardown(x);
}

static void a_release_and_a_close_count_nothing(void)
{
	bench x = setup(STRICT);
	shmq_message m;

	publish(&x, 1);
	for (uint32_t i = 0; i < 5; i++) {
		m = take(&x);
		EQUAL(shmq_release(x.c, &m, 1, 0, NULL, soon()), 0);
	}
	m = take(&x);
	EQUAL(shmq_consumer_close(x.c, soon()), 0);
	shmq_consumer_free(x.c);
	x.c = world_consumer(x.w, x.b, x.queue, x.serial, 1000);
	m = take(&x);
	EQUAL(failures(&x, &m), 0);
	EQUAL(m.attempts, 7);
	teardown(x);
}

static void without_a_policy_nothing_is_counted(void)
{
	bench x = setup((shmq_settings){0});
	shmq_message m;

	publish(&x, 1);
	for (uint32_t i = 0; i < 5; i++) {
		m = take(&x);
		EQUAL(shmq_retry(x.c, &m, 1, NULL, soon()), 0);
	}
	EQUAL(die_with(&x, 1), 1);
	m = take(&x);
	EQUAL(slot_of(&x, &m)->flags, 0);
	teardown(x);
}

static void time_outs_count(void)
{
	bench x = setup(STRICT);
	shmq_message m;

	publish(&x, 1);
	for (uint32_t i = 0; i < 3; i++) {
		m = take(&x);
		EQUAL(failures(&x, &m), i);
		scan(&x, shmq_now() + 100 * NS_PER_S, shmq_realtime());
	}
	CHECK(nothing_to_take(&x));
	EQUAL(move_the_dead(&x), 1);
	teardown(x);
}

static void a_death_in_company_makes_suspects_and_convicts_nobody(void)
{
	bench x = setup(STRICT);
	shmq_message m;
	uint32_t got;

	publish(&x, 4);
	for (uint32_t i = 0; i < 2; i++) {
		m = take(&x);
		EQUAL(shmq_requeue(x.c, &m, 1, 0, NULL, soon()), 0); /* 0 and 1 have failed once */
	}
	EQUAL(die_with(&x, 4), 4);
	EQUAL(die_with(&x, 4), 1); /* "2", alone: twice now */
	{
		shmq_message many[4];
		EQUAL(shmq_take(x.c, many, 4, soon(), &got), 0);
		EQUAL(got, 1);
		EQUAL(shmq_take(x.c, &m, 1, soon(), &got), SHMQ_EMPTY); /* it holds a suspect */
		EQUAL(shmq_finish(x.c, many, 1, NULL, soon()), 0);
	}
	EQUAL(move_the_dead(&x), 0);
	teardown(x);
}

static void a_death_in_company_after_the_limit_was_lowered(void)
{
	bench x = setup((shmq_settings){.max_attempts = 10});
	shmq_message m;

	publish(&x, 2);
	for (uint32_t i = 0; i < 10; i++) {
		m = take(&x); /* 0 and 1 in turn */
		EQUAL(shmq_requeue(x.c, &m, 1, 0, NULL, soon()), 0);
	}
	configure(&x, STRICT);
	EQUAL(die_with(&x, 2), 2);
	for (uint32_t i = 0; i < 2; i++) {
		m = take(&x);
		EQUAL(failures(&x, &m), 5); /* no less than before, and no conviction */
		CHECK(slot_of(&x, &m)->flags & SHMQ_SLOT_SUSPECT);
		EQUAL(shmq_release(x.c, &m, 1, 0, NULL, soon()), 0);
	}
	EQUAL(move_the_dead(&x), 0);
	for (uint32_t i = 0; i < 2; i++) {
		m = take(&x);
		EQUAL(shmq_requeue(x.c, &m, 1, 0, NULL, soon()), 0);
	}
	EQUAL(move_the_dead(&x), 2);
	teardown(x);
}

/* A client works on batches of 20 until it meets "7" and dies of it. Returns false if it never did. */
static bool work_until_death(bench *x)
{
	uint32_t returned;
	int status;
	pid_t child = fork();

	if (!child) {
		shmq_broker *b = world_attach(x->w, SHMQ_AS_CLIENT);
		shmq_consumer *c = world_consumer(x->w, b, x->queue, x->serial, 1000);
		shmq_message m[20];
		uint32_t got;

		while (!shmq_take(c, m, 20, soon(), &got))
			for (uint32_t i = 0; i < got; i++) {
				if (body_is(&m[i], "7"))
					_exit(7);
				EQUAL(shmq_finish(c, &m[i], 1, NULL, soon()), 0);
			}
		_exit(0);
	}
	CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
	EQUAL(world_reap(x->w, x->w->supervisor, &returned), 1);
	SOUND(x->w);
	return WEXITSTATUS(status);
}

static void a_poison_message_convicts_itself_alone(void)
{
	bench x = setup(STRICT);
	shmq_message m;
	uint32_t deaths = 0;

	publish(&x, 40);
	while (work_until_death(&x))
		deaths++;
	EQUAL(deaths, 3);
	CHECK(nothing_to_take(&x));
	EQUAL(ld(&world_view(x.w, x.queue)->q->finished), 39);
	EQUAL(move_the_dead(&x), 1);
	EQUAL(bury(&x, &m), 1);
	CHECK(body_is(&m, "7"));
	teardown(x);
}

static void a_suspect_goes_only_to_a_client_with_nothing_in_flight(void)
{
	bench x = setup(STRICT);
	shmq_consumer *second;
	shmq_message m, other;
	uint32_t got;

	publish(&x, 3);
	m = take(&x);
	EQUAL(die_with(&x, 1), 1); /* "1" is a suspect */
	CHECK(nothing_to_take(&x));
	EQUAL(shmq_consumer_wait(x.c, shmq_now() + NS_PER_S / 1000), SHMQ_TIMEOUT); /* no spinning */
	second = world_consumer(x.w, x.b, x.queue, x.serial, 10);
	EQUAL(shmq_take(second, &other, 1, soon(), &got), SHMQ_EMPTY); /* the same client */
	EQUAL(shmq_finish(x.c, &m, 1, NULL, soon()), 0);
	EQUAL(shmq_consumer_wait(second, shmq_now() + NS_PER_S / 1000), 0);
	EQUAL(shmq_take(second, &other, 1, soon(), &got), 0);
	CHECK(body_is(&other, "1"));
	CHECK(nothing_to_take(&x)); /* it holds a suspect */
	EQUAL(shmq_consumer_wait(x.c, shmq_now() + NS_PER_S / 1000), SHMQ_TIMEOUT);
	EQUAL(shmq_requeue(second, &other, 1, 0, NULL, soon()), 0); /* it has outlived it */
	m = take(&x);
	CHECK(body_is(&m, "2"));
	EQUAL(shmq_take(second, &other, 1, soon(), &got), 0);
	CHECK(body_is(&other, "1"));
	EQUAL(slot_of(&x, &other)->flags, SHMQ_SLOT_FAILED);
	EQUAL(shmq_consumer_close(second, soon()), 0);
	shmq_consumer_free(second);
	teardown(x);
}

static void retries_wait_twice_as_long_each_time(void)
{
	bench x = setup((shmq_settings){.retry_first = NS_PER_S, .retry_most = 5 * NS_PER_S});
	static const int64_t waits[] = {1, 2, 4, 5, 5};
	shmq_message m;

	publish(&x, 1);
	for (uint32_t i = 0; i < 5; i++) {
		int64_t before = shmq_realtime(), due;

		m = take(&x);
		EQUAL(shmq_retry(x.c, &m, 1, NULL, soon()), 0);
		CHECK(nothing_to_take(&x));
		due = slot_of(&x, &m)->deadline;
		CHECK(due >= before + waits[i] * NS_PER_S * 9 / 10);
		CHECK(due <= shmq_realtime() + waits[i] * NS_PER_S * 11 / 10 + 1000);
		scan(&x, 0, INT64_MAX);
	}
	m = take(&x);
	EQUAL(shmq_requeue(x.c, &m, 1, 0, NULL, soon()), 0); /* a delay that is given wins */
	m = take(&x);
	EQUAL(shmq_requeue(x.c, &m, 1, 100 * NS_PER_S, NULL, soon()), 0);
	CHECK(slot_of(&x, &m)->deadline > shmq_realtime() + 50 * NS_PER_S);
	scan(&x, 0, INT64_MAX);
	EQUAL(die_with(&x, 1), 1);
	CHECK(nothing_to_take(&x));
	scan(&x, shmq_now(), INT64_MAX);
	m = take(&x);
	EQUAL(failures(&x, &m), 8);
	scan(&x, shmq_now() + 100 * NS_PER_S, 0);
	CHECK(nothing_to_take(&x)); /* a time-out waits, too */
	teardown(x);
}

static void a_suspect_that_waited_goes_first_and_alone(void)
{
	bench x = setup((shmq_settings){
		.max_attempts = 5, .retry_first = NS_PER_S, .retry_most = 5 * NS_PER_S});
	shmq_message m[8];
	uint32_t got;

	publish(&x, 4);
	EQUAL(die_with(&x, 1), 1);
	EQUAL(shmq_take(x.c, m, 1, soon(), &got), 0);
	CHECK(body_is(m, "1"));
	EQUAL(shmq_finish(x.c, m, 1, NULL, soon()), 0);
	scan(&x, 0, INT64_MAX);
	EQUAL(shmq_take(x.c, m, 8, soon(), &got), 0);
	EQUAL(got, 1);
	CHECK(body_is(m, "0"));
	teardown(x);
}

static void a_rejected_message_is_left_to_its_consumer_for_a_while(void)
{
	bench x = setup((shmq_settings){0});
	shmq_message m, buried;
	uint32_t moved;

	publish(&x, 2);
	m = take(&x);
	EQUAL(shmq_reject(x.c, &m, 1, 60 * NS_PER_S, NULL, soon()), 0);
	EQUAL(shmq_reject(x.c, &m, 1, 0, NULL, soon()), SHMQ_NOT_IN_FLIGHT);
	EQUAL(slot_of(&x, &m)->flags >> SHMQ_SLOT_REASON_SHIFT, SHMQ_DEAD_REJECTED);
	scan(&x, 0, shmq_realtime());
	EQUAL(move_the_dead(&x), 0);
	EQUAL(MAPPED(x.w, x.b,
	             shmq_dead_move(x.b, x.queue, x.serial, &x.dead,
	                            &(shmq_dead_wish){.messages = &m, .n = 1}, soon(), &moved)),
	      0);
	EQUAL(moved, 1);
	EQUAL(bury(&x, &buried), 1);
	EQUAL(buried.id, m.id);
	m = take(&x);
	EQUAL(shmq_reject(x.c, &m, 1, 0, NULL, soon()), 0);
	EQUAL(move_the_dead(&x), 1);
	EQUAL(shmq_dead_move(x.b, x.queue, x.serial, &x.dead, &(shmq_dead_wish){.messages = &m, .n = 1},
	                     soon(), &moved),
	      0);
	EQUAL(moved, 0);
	teardown(x);
}

/* Returns true if the message has this property; text NULL: if it has none of the name. */
static bool has(const shmq_message *m, const char *name, const char *text)
{
	const uint8_t *block = (const uint8_t *)m->body - m->properties;
	shmq_property p;
	uint64_t at = 0;

	while (shmq_property_next(block, m->properties, &at, &p) > 0)
		if (p.name_length == strlen(name) && !memcmp(p.name, name, p.name_length))
			return text && p.length == strlen(text) && !memcmp(p.value, text, p.length);
	return !text;
}

static void a_dead_letter_says_why(void)
{
	bench x = setup(STRICT);
	uint8_t block[SHMQ_PROPERTIES_MOST];
	uint64_t length = 0, id;
	shmq_body body = {"0", 1}, properties = {block, 0};
	shmq_message m, dead;
	shmq_consumer *c;
	char pid[24], error[2000];
	uint32_t got, moved;
	uint8_t ok;

	EQUAL(shmq_property_add(block, &length, &(shmq_property){"trace", "abc", 5, 3}), 0);
	properties.length = length;
	EQUAL(shmq_publish_on(x.p, &body, 1, &(shmq_terms){.properties = &properties}, soon(), &id), 0);
	m = take(&x);
	EQUAL(shmq_requeue(x.c, &m, 1, 0, NULL, soon()), 0);
	m = take(&x);
	EQUAL(shmq_reject(x.c, &m, 1, 60 * NS_PER_S, NULL, soon()), 0);
	memset(error, 'e', sizeof(error));
	x.dead.error = error;
	x.dead.error_length = sizeof(error);
	EQUAL(MAPPED(x.w, x.b,
	             shmq_dead_move(x.b, x.queue, x.serial, &x.dead,
	                            &(shmq_dead_wish){.messages = &m, .n = 1}, soon(), &moved)),
	      0);
	c = world_consumer(x.w, x.b, x.dead_queue, x.dead_serial, 10);
	EQUAL(shmq_take(c, &dead, 1, soon(), &got), 0);
	CHECK(body_is(&dead, "0") && has(&dead, "trace", "abc"));
	CHECK(has(&dead, "dead-reason", "rejected") && has(&dead, "dead-from", "t/c"));
	snprintf(pid, sizeof(pid), "%d", (int)getpid());
	CHECK(has(&dead, "dead-pid", pid) && has(&dead, "dead-failures", "2"));
	error[1024] = 0;
	CHECK(has(&dead, "dead-error", error) && !has(&dead, "dead-when", NULL));
	EQUAL(shmq_redrive(c, &dead, 1, x.queue, x.serial, &ok, soon()), 0);
	m = take(&x);
	CHECK(has(&m, "trace", "abc") && has(&m, "dead-reason", NULL) && has(&m, "dead-error", NULL));
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
	teardown(x);
}

static void a_body_of_the_greatest_length_leaves_no_room_for_notes(void)
{
	bench x = setup(STRICT);
	char *whole = calloc(1, 1 << 20);
	shmq_body body = {whole, 1 << 20};
	shmq_message m;
	uint64_t id;

	EQUAL(shmq_publish(x.p, &body, 1, 0, soon(), &id), 0);
	m = take(&x);
	EQUAL(shmq_reject(x.c, &m, 1, 0, NULL, soon()), 0);
	EQUAL(move_the_dead(&x), 1);
	EQUAL(bury(&x, &m), 1);
	EQUAL(m.length, 1 << 20);
	EQUAL(m.properties, 0);
	free(whole);
	teardown(x);
}

static void a_dead_letter_cannot_be_rejected(void)
{
	bench x = setup((shmq_settings){0});
	shmq_consumer *c;
	shmq_message m;
	uint32_t got;

	publish(&x, 1);
	m = take(&x);
	EQUAL(shmq_reject(x.c, &m, 1, 0, NULL, soon()), 0);
	EQUAL(move_the_dead(&x), 1);
	c = world_consumer(x.w, x.b, x.dead_queue, x.dead_serial, 10);
	EQUAL(shmq_take(c, &m, 1, soon(), &got), 0);
	EQUAL(shmq_reject(c, &m, 1, 0, NULL, soon()), SHMQ_INVALID);
	EQUAL(shmq_finish(c, &m, 1, NULL, soon()), 0);
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
	teardown(x);
}

static void a_redriven_message_has_its_id_and_no_failures(void)
{
	bench x = setup(STRICT);
	shmq_consumer *c;
	shmq_message m, dead;
	int64_t before;
	uint32_t got;
	uint8_t ok;

	publish(&x, 1);
	for (uint32_t i = 0; i < 3; i++) {
		m = take(&x);
		EQUAL(shmq_requeue(x.c, &m, 1, 0, NULL, soon()), 0);
	}
	EQUAL(move_the_dead(&x), 1);
	c = world_consumer(x.w, x.b, x.dead_queue, x.dead_serial, 10);
	EQUAL(shmq_take(c, &dead, 1, soon(), &got), 0);
	EQUAL(dead.timestamp, m.timestamp);
	before = shmq_realtime();
	EQUAL(shmq_redrive(c, &dead, 1, x.queue, x.serial, &ok, soon()), 0);
	EQUAL(ok, 1);
	EQUAL(shmq_redrive(c, &dead, 1, x.queue, x.serial, &ok, soon()), SHMQ_NOT_IN_FLIGHT);
	EQUAL(ok, 0);
	SOUND(x.w);
	EQUAL(bury(&x, &dead), 0);
	dead = take(&x);
	CHECK(before <= dead.timestamp && dead.timestamp <= shmq_realtime());
	EQUAL(dead.id, m.id);
	EQUAL(failures(&x, &dead), 0);
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
	teardown(x);
}

static void what_cannot_be_moved_is_put_off(void)
{
	bench x = setup((shmq_settings){.max_attempts = 1});
	int64_t due = shmq_realtime() + NS_PER_S;
	shmq_message m;
	uint32_t count, moved;

	publish(&x, 2);
	for (uint32_t i = 0; i < 2; i++) {
		m = take(&x);
		EQUAL(shmq_requeue(x.c, &m, 1, 0, NULL, soon()), 0);
	}
	scan(&x, 0, shmq_realtime());
	CHECK(shmq_dead_waiting(x.w->supervisor, x.queue));
	EQUAL(shmq_dead_postpone(x.w->supervisor, x.queue, due, 10, soon(), &count), 0);
	EQUAL(count, 2);
	CHECK(!shmq_dead_waiting(x.w->supervisor, x.queue));
	EQUAL(ld(&x.b->next_due[x.queue]), due);
	EQUAL(move_the_dead(&x), 0);
	scan(&x, 0, due + 1);
	CHECK(shmq_dead_waiting(x.w->supervisor, x.queue));
	EQUAL(move_the_dead(&x), 1);
	scan(&x, 0, due + 1);
	EQUAL(move_the_dead(&x), 1);
	EQUAL(MAPPED(x.w, x.w->supervisor,
	             shmq_dead_move(x.w->supervisor, x.queue, x.serial,
	                            &(shmq_dead_target){.topic = x.topic, .generation = x.generation},
	                            &(shmq_dead_wish){.n = 1}, soon(), &moved)),
	      SHMQ_INVALID);
	teardown(x);
}

static void the_name_of_the_dead_topic(void)
{
	bench x = setup((shmq_settings){0});
	char name[SHMQ_NAME];
	uint64_t serial;
	uint32_t queue;

	EQUAL(shmq_dead_topic(x.b, x.queue, x.serial, soon(), name), 0);
	CHECK(!strcmp(name, "t.c.dead"));
	configure(&x, (shmq_settings){.dead_letter = "elsewhere"});
	EQUAL(shmq_dead_topic(x.b, x.queue, x.serial, soon(), name), 0);
	CHECK(!strcmp(name, "elsewhere"));
	queue = world_queue(x.w, x.topic,
	                    "a-channel-with-a-name-of-sixty-characters-which-is-too-long-x", &serial);
	EQUAL(MAPPED(x.w, x.b, shmq_dead_topic(x.b, queue, serial, soon(), name)), SHMQ_BAD_NAME);
	CHECK(strstr(shmq_error_detail(), "dead_letter"));
	queue = world_queue(x.w, x.topic, NULL, &serial);
	EQUAL(MAPPED(x.w, x.b, shmq_dead_topic(x.b, queue, serial, soon(), name)), SHMQ_INVALID);
	teardown(x);
}

int main(void)
{
	requeues_count_and_the_last_convicts();
	a_release_and_a_close_count_nothing();
	without_a_policy_nothing_is_counted();
	time_outs_count();
	a_death_in_company_makes_suspects_and_convicts_nobody();
	a_death_in_company_after_the_limit_was_lowered();
	a_poison_message_convicts_itself_alone();
	a_suspect_goes_only_to_a_client_with_nothing_in_flight();
	retries_wait_twice_as_long_each_time();
	a_suspect_that_waited_goes_first_and_alone();
	a_rejected_message_is_left_to_its_consumer_for_a_while();
	a_dead_letter_says_why();
	a_body_of_the_greatest_length_leaves_no_room_for_notes();
	a_dead_letter_cannot_be_rejected();
	a_redriven_message_has_its_id_and_no_failures();
	what_cannot_be_moved_is_put_off();
	the_name_of_the_dead_topic();
	puts("ok");
	return 0;
}
