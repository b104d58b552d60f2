/* Seals: the tag that a message of a pool has on disk, which who does not know the key cannot make. */
#include "../../native/core/format/seal.c"
#include "harness.h"

static void the_function_is_siphash(void)
{
	/* Key and message are 00 01 02 ..; the tags are those of OpenSSL. */
	static const uint8_t expected[4][SEAL_BYTES] = {
		{0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6, 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55, 0x02,
		 0x93},
		{0xda, 0x87, 0xc1, 0xd8, 0x6b, 0x99, 0xaf, 0x44, 0x34, 0x76, 0x59, 0x11, 0x9b, 0x22, 0xfc,
		 0x45},
		{0x3b, 0x62, 0xa9, 0xba, 0x62, 0x58, 0xf5, 0x61, 0x0f, 0x83, 0xe2, 0x64, 0xf3, 0x14, 0x97,
		 0xb4},
		{0x01, 0x51, 0xc5, 0x68, 0x38, 0x6b, 0x66, 0x77, 0xa2, 0xb4, 0xdc, 0x6f, 0x81, 0xe5, 0xdc,
		 0x18}};
	static const uint64_t lengths[4] = {0, 1, 8, 11};
	uint8_t bytes[16], tag[SEAL_BYTES];

	for (uint8_t i = 0; i < 16; i++)
		bytes[i] = i;
	for (int i = 0; i < 4; i++) {
		sip(bytes, bytes, lengths[i], tag);
		CHECK(!memcmp(tag, expected[i], SEAL_BYTES));
	}
}

static void a_seal_fits_one_message_alone(void)
{
	static const uint8_t none[SHMQ_SEAL_KEY] = {0};
	uint8_t key[SHMQ_SEAL_KEY] = {1}, other[SHMQ_SEAL_KEY] = {2}, tag[SEAL_BYTES];

	seal_make(key, "jobs", 7, "body", 4, tag);
	CHECK(seal_fits(key, "jobs", 7, "body", 4, tag));
	CHECK(!seal_fits(other, "jobs", 7, "body", 4, tag));
	CHECK(!seal_fits(key, "job", 7, "body", 4, tag));
	CHECK(!seal_fits(key, "jobs", 8, "body", 4, tag));
	CHECK(!seal_fits(key, "jobs", 7, "bodY", 4, tag));
	CHECK(!seal_fits(key, "jobs", 7, "body", 3, tag));
	for (unsigned i = 0; i < 8 * SEAL_BYTES; i++) {
		tag[i / 8] ^= (uint8_t)(1u << i % 8);
		CHECK(!seal_fits(key, "jobs", 7, "body", 4, tag));
		tag[i / 8] ^= (uint8_t)(1u << i % 8);
	}
	/* A directory without a key, which no supervisor makes: nothing fits. */
	seal_make(none, "jobs", 7, "body", 4, tag);
	CHECK(!seal_fits(none, "jobs", 7, "body", 4, tag));
}

int main(void)
{
	the_function_is_siphash();
	a_seal_fits_one_message_alone();
	return 0;
}
