#include "scene.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

bool watched;
char *wrong_words;

void watch_begin(void)
{
	if (watched)
		raise(SIGUSR1);
}

void watch_end(void)
{
	if (watched)
		raise(SIGUSR2);
}

void watch_over(void)
{
	raise(SIGTERM);
	_exit(0);
}

void wrong(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(wrong_words, WRONG, format, args);
	va_end(args);
	_exit(1);
}

int64_t soon(void)
{
	return shmq_now() + 10 * SECOND;
}

int64_t in_an_hour(void)
{
	return shmq_realtime() + 3600 * SECOND - SECOND;
}

/* ---- files ---- */

void *shared(size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED) {
		perror("mmap");
		exit(2);
	}
	return p;
}

void files_make(files *f)
{
	for (uint32_t i = 0; i < FILES; i++) {
		f->fd[i] = memfd_create("segment", MFD_CLOEXEC);
		CHECK(f->fd[i] >= 0);
		f->map[i] = mmap(NULL, SPAN, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, f->fd[i],
		                 0);
		CHECK(f->map[i] != MAP_FAILED);
	}
}

void map_missing(scene *s, shmq_broker *b)
{
	uint32_t queue;
	uint64_t serial;

	shmq_broker_missing(b, &queue, &serial);
	CHECK(serial && serial < FILES - 1);
	EQUAL(shmq_broker_map(b, queue, serial, s->files->fd[serial]), 0);
}

shmq_broker *attach(scene *s, enum shmq_kind kind)
{
	shmq_broker *b;

	EQUAL(shmq_broker_open(s->files->fd[0], &b), 0);
	EQUAL(WATCHED(shmq_broker_attach(b, kind, soon())), 0);
	return b;
}

/* ---- messages ---- */

uint8_t *body_make(uint32_t number, uint32_t length)
{
	uint8_t *body = malloc(length);

	CHECK(body);
	body[0] = (uint8_t)number;
	for (uint32_t i = 1; i < length; i++)
		body[i] = (uint8_t)(number * 7 + i);
	return body;
}

uint32_t body_number(const uint8_t *body, uint64_t length)
{
	uint32_t number = body[0];

	for (uint64_t i = 1; i < length; i++)
		if (body[i] != (uint8_t)(number * 7 + i))
			return MESSAGES;
	return number < MESSAGES ? number : MESSAGES;
}

void properties_make(uint32_t number, uint8_t block[PROPERTIES])
{
	const uint8_t entry[PROPERTIES] = {1, 'n', 1, 0, (uint8_t)number};

	memcpy(block, entry, PROPERTIES);
}

bool properties_are(const scene *s, uint32_t number, const uint8_t *block, uint64_t length)
{
	uint8_t expected[PROPERTIES];
	uint64_t own = number < MESSAGES && s->ledger->with[number] ? PROPERTIES : 0;

	properties_make(number, expected);
	if (number >= MESSAGES || length < own || memcmp(block, expected, own))
		return false;
	/* A dead letter also has some that say why it died. */
	return length == own ||
	       (s->ledger->carries && length > own + 6 && !memcmp(block + own + 1, "dead-", 5));
}

void set_fates(scene *s, uint32_t first, uint32_t n, enum fate fate)
{
	for (uint32_t i = first; i < first + n && i < MESSAGES; i++) {
		s->ledger->batch[i] = (uint8_t)first;
		for (uint32_t q = 0; q < QUEUES; q++)
			if (s->ledger->targets >> q & 1)
				s->ledger->fate[q][i] = s->ledger->leaving >> q & 1 ? EITHER : (uint8_t)fate;
	}
}

int try_publish(scene *s, shmq_broker *b, shmq_producer *p, uint32_t n, uint32_t length,
                int64_t due)
{
	shmq_body bodies[MESSAGES], properties[MESSAGES];
	shmq_terms terms = {.due = due, .properties = s->ledger->properties ? properties : NULL};
	uint8_t blocks[MESSAGES][PROPERTIES];
	uint32_t first = s->ledger->next;
	uint64_t id;
	int r;

	CHECK(first + n <= MESSAGES);
	for (uint32_t i = 0; i < n; i++) {
		bodies[i] = (shmq_body){body_make(first + i, length), length};
		s->ledger->due[first + i] = due;
		s->ledger->with[first + i] = s->ledger->properties;
		s->ledger->sealed[first + i] = s->ledger->seal ? SEALED : UNSEALED;
		properties_make(first + i, blocks[i]);
		properties[i] = (shmq_body){blocks[i], PROPERTIES};
	}
	set_fates(s, first, n, GROUP);
	s->ledger->next += n;
	r = terms.properties ? CALL(s, b, shmq_publish_on(p, bodies, n, &terms, soon(), &id))
	                     : CALL(s, b, shmq_publish(p, bodies, n, due, soon(), &id));
	set_fates(s, first, n, r ? NEVER : DUE);
	for (uint32_t i = 0; i < n; i++)
		free((void *)(uintptr_t)bodies[i].data);
	return r;
}

void publish(scene *s, shmq_broker *b, shmq_producer *p, uint32_t n, uint32_t length, int64_t due)
{
	EQUAL(try_publish(s, b, p, n, length, due), 0);
}

/* A consumer that got one message of a batch knows that the batch was published. */
static void batch_is_there(ledger *l, uint32_t number)
{
	for (uint32_t q = 0; q < l->queues; q++)
		for (uint32_t i = 0; i < l->next; i++)
			if (l->batch[i] == l->batch[number] && l->fate[q][i] == GROUP)
				l->fate[q][i] = DUE;
}

static uint8_t *fate_of(ledger *l, uint32_t q, uint32_t number)
{
	return &l->fate[l->carries && q == 1 && l->fate[1][number] == NEVER ? 0 : q][number];
}

void finish(scene *s, uint32_t q, shmq_consumer *c, const shmq_message *m, uint32_t n)
{
	uint32_t numbers[64];

	for (uint32_t i = 0; i < n; i++) {
		numbers[i] = body_number(m[i].body, m[i].length);
		CHECK(numbers[i] < MESSAGES);
		if (!properties_are(s, numbers[i], (const uint8_t *)m[i].body - m[i].properties,
		                    m[i].properties))
			wrong("queue %u: message %u was delivered with other properties", q, numbers[i]);
		if (m[i].sealed != (s->ledger->sealed[numbers[i]] == SEALED))
			wrong("queue %u: message %u was delivered %s", q, numbers[i],
			      m[i].sealed ? "sealed" : "without its seal");
		batch_is_there(s->ledger, numbers[i]);
		if (*fate_of(s->ledger, q, numbers[i]) != DUE &&
		    *fate_of(s->ledger, q, numbers[i]) != EITHER)
			wrong("queue %u: message %u was delivered", q, numbers[i]);
		*fate_of(s->ledger, q, numbers[i]) = EITHER;
	}
	EQUAL(WATCHED(shmq_finish(c, m, n, NULL, soon())), 0);
	for (uint32_t i = 0; i < n; i++)
		*fate_of(s->ledger, q, numbers[i]) = DONE;
}

shmq_consumer *consume(scene *s, shmq_broker *b, uint32_t q)
{
	shmq_consumer *c = NULL;

	EQUAL(CALL(s, b,
	           shmq_consumer_open(b, s->ledger->queue[q].index, s->ledger->queue[q].serial, 100, 0,
	                              soon(), &c)),
	      0);
	return c;
}

void restore(scene *s, shmq_broker *b, uint32_t q)
{
	const shmq_queue_desc *desc = queue_of(s, q);
	uint64_t from = desc->disk_read, to = desc->disk_write, used;
	uint32_t taken;

	CHECK(q == 0 && to <= sizeof(s->ledger->disk) && from < to);
	EQUAL(CALL(s, b,
	           shmq_restore(b, s->ledger->queue[q].index,
	                        &(shmq_records){.data = s->ledger->disk + from,
	                                        .length = to - from,
	                                        .position = from,
	                                        .next_position = to},
	                        soon(), &taken, &used)),
	      0);
	CHECK(taken);
}

bool load_chunk(scene *s, shmq_broker *b, uint32_t most)
{
	const shmq_queue_desc *desc = queue_of(s, 0);
	const ledger *l = s->ledger;
	uint64_t read = desc->deferred_read, at = 0, bytes = 0;
	uint32_t next = read >> SHMQ_CHUNK_SHIFT == 1 ? (uint32_t)(read & 0xffffff) : 0, n, taken;

	if (!desc->deferred_write || desc->deferred_gone || next >= l->chunk_count)
		return false;
	n = l->chunk_count - next;
	if (n > most)
		n = most;
	for (uint32_t i = 0; i < next; i++)
		at += l->chunk_lengths[i];
	for (uint32_t i = next; i < next + n; i++)
		bytes += l->chunk_lengths[i];
	EQUAL(CALL(s, b,
	           shmq_chunk_load(
					   b, l->queue[0].index,
					   &(shmq_chunk_records){.data = l->chunk + at,
					                         .length = bytes,
					                         .dues = l->chunk_dues + next,
					                         .n = n,
					                         .position = UINT64_C(1) << SHMQ_CHUNK_SHIFT | next},
					   soon(), &taken)),
	      0);
	EQUAL(taken, n);
	return true;
}

/* ---- clients and supervisors ---- */

shmq_producer *produce(const scene *s, shmq_broker *b)
{
	shmq_producer *p;

	EQUAL(shmq_producer_open(b, s->topic, s->generation, &p), 0);
	if (s->ledger->seal)
		shmq_producer_seal(p);
	return p;
}

void come(scene *s)
{
	s->mine = attach(s, SHMQ_AS_CLIENT);
	s->my_producer = produce(s, s->mine);
}

void come_to_supervise(scene *s)
{
	s->mine = attach(s, SHMQ_AS_SUPERVISOR);
	supervise(s, s->mine);
	for (uint32_t q = 0; q < s->ledger->queues; q++)
		EQUAL(shmq_broker_map(s->mine, s->ledger->queue[q].index, s->ledger->queue[q].serial,
		                      s->files->fd[s->ledger->queue[q].serial]),
		      0);
}

void supervise(scene *s, shmq_broker *b)
{
	EQUAL(WATCHED(shmq_supervise(b, &s->limits, soon())), 0);
	EQUAL(WATCHED(shmq_data_path_set(b, "/there")), 0);
}

void adopt_all(scene *s, shmq_broker *b)
{
	for (uint32_t i = 0; i < directory_of(s)->queues_committed; i++)
		if (entries_of(s)[i].state == SHMQ_ENTRY_LIVE)
			EQUAL(CALL(s, b, shmq_adopt(b, i, soon())), 0);
}

void reap_all(scene *s, shmq_broker *b)
{
	uint32_t found, returned;
	shmq_dead dead[16];

	EQUAL(WATCHED(shmq_reap_scan(b, dead, 16, &found)), 0);
	for (uint32_t i = 0; i < found; i++)
		EQUAL(CALL(s, b, shmq_reap(b, dead[i].client, dead[i].generation, soon(), &returned)), 0);
}

/* ---- queues ---- */

uint32_t make_queue(scene *s, shmq_broker *b, const char *channel, uint64_t *serial)
{
	uint32_t index;

	EQUAL(WATCHED(shmq_queue_reserve(b, soon(), &index, serial)), 0);
	CHECK(*serial < FILES - 1);
	s->ledger->new_index = index;
	s->ledger->new_serial = *serial;
	EQUAL(WATCHED(shmq_queue_create(
				  b, s->files->fd[*serial],
				  &(shmq_queue_spec){
					  .queue = index, .serial = *serial, .topic = s->topic, .base = "t:c"})),
	      0);
	EQUAL(WATCHED(shmq_chunk_start(s->files->fd[*serial], 0, 0)), 0);
	EQUAL(CALL(s, b, shmq_queue_enter(b, index, *serial, s->topic, channel, soon())), 0);
	return index;
}

void add_queue(scene *s, uint32_t index, uint64_t serial, bool target)
{
	ledger *l = s->ledger;

	CHECK(l->queues < QUEUES);
	l->queue[l->queues].index = index;
	l->queue[l->queues].serial = serial;
	l->targets |= (uint32_t)target << l->queues++;
	l->new_serial = 0;
}

void scene_make(scene *s, const operation *o, files *f, ledger *l)
{
	static const uint8_t key[SHMQ_SEAL_KEY] = "the key of the scene's instance";
	static const char *const names[] = {"a", "b", "c"};
	uint64_t serial;

	*s = (scene){.operation = o,
	             .files = f,
	             .ledger = l,
	             .limits = {.msg_timeout_ns = 60 * SECOND,
	                        .max_msg_timeout_ns = 900 * SECOND,
	                        .max_req_timeout_ns = 3600 * SECOND,
	                        .max_msg_size = 32 << 10,
	                        .arena_size = 64 << 10,
	                        .node_id = 5,
	                        .mem_queue_size = 24,
	                        .in_flight_slots = 16}};
	s->spill = (shmq_spill){
		.slots = s->spill_slots, .lengths = s->spill_lengths, .positions = s->spill_positions};
	memset(l, 0, sizeof(*l));
	EQUAL(shmq_directory_create(f->fd[0], &s->limits, key), 0);
	s->home = attach(s, SHMQ_AS_SUPERVISOR);
	supervise(s, s->home);
	EQUAL(shmq_topic_create(s->home, "t", 0, NULL, soon(), &s->topic, &s->generation), 0);
	for (uint32_t i = 0; i < (o->channels ? o->channels : 1); i++) {
		uint32_t index = make_queue(s, s->home, o->channels ? names[i] : NULL, &serial);

		add_queue(s, index, serial, true);
	}
	s->alive = attach(s, SHMQ_AS_CLIENT);
	s->producer = produce(s, s->alive);
	publish(s, s->alive, s->producer, 4, SMALL, 0);
	if (o->prepare)
		o->prepare(s);
}
