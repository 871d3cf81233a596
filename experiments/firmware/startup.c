/* What runs before and after main on a Cortex-M without an operating system: vectors, memory, a count of instructions.
 *
 * The emulator advances its clock by one nanosecond per instruction (-icount shift=0), so SysTick, which counts that
 * clock at HERTZ, counts instructions in steps of 10^9 / HERTZ. Output goes through semihosting. */
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

extern uint32_t firmware_data_load[], firmware_data[], firmware_data_end[], firmware_bss[], firmware_bss_end[];
extern uint32_t firmware_stack_limit[], firmware_stack_top[];

void initialise_monitor_handles(void);
void firmware_start(void);
void firmware_stop(void);
int main(void);
void reset(void);

#define SYST_CSR (*(volatile uint32_t *)0xE000E010u)
#define SYST_RVR (*(volatile uint32_t *)0xE000E014u)
#define SYST_CVR (*(volatile uint32_t *)0xE000E018u)
#define CPACR (*(volatile uint32_t *)0xE000ED88u)
#define RELOAD 0x00FFFFFFu
#define UNUSED 0xC5C5C5C5u

static volatile uint32_t wraps;
static uint64_t fewest = UINT64_MAX;
static uint32_t calls;

static void tick(void) { wraps++; }

static void fault(void)
{
    puts("firmware: a fault of the processor");
    _exit(3);
}

/* The processor reads the stack pointer and the address of `reset` here; the entries behind them are exceptions. */
__attribute__((section(".vectors"), used)) static const void *const vectors[16] = {
    firmware_stack_top, (const void *)reset, (const void *)fault, (const void *)fault,
    (const void *)fault, (const void *)fault, (const void *)fault, 0,
    0, 0, 0, (const void *)fault,
    (const void *)fault, 0, (const void *)fault, (const void *)tick,
};

static uint64_t ticks(void)
{
    uint32_t before, now;
    do {
        before = wraps;
        now = RELOAD - SYST_CVR;
    } while (before != wraps);
    return (uint64_t)before * (RELOAD + 1u) + now;
}

static uint64_t start;

/* what is called before and after the network, see build.py */
void firmware_start(void) { start = ticks(); }

void firmware_stop(void)
{
    const uint64_t spent = ticks() - start;
    if (spent < fewest) {
        fewest = spent;
    }
    calls++;
}

__attribute__((noreturn)) void reset(void)
{
    uint32_t *from = firmware_data_load, *to;
    for (to = firmware_data; to < firmware_data_end; to++) {
        *to = *from++;
    }
    for (to = firmware_bss; to < firmware_bss_end; to++) {
        *to = 0;
    }
    for (to = firmware_stack_limit; to < firmware_stack_top - 64; to++) {
        *to = UNUSED;
    }
    CPACR |= 0xFu << 20; /* floating point and vectors, which the compiler may use for integers too */
    __asm volatile("dsb\n isb");
    SYST_RVR = RELOAD;
    SYST_CVR = 0;
    SYST_CSR = 7;
    initialise_monitor_handles();
    const int rc = main();
    for (to = firmware_stack_limit; to < firmware_stack_top && *to == UNUSED; to++) {
    }
    printf("firmware: %lu calls, %llu instructions, %lu bytes of stack\n", (unsigned long)calls,
           (unsigned long long)(fewest * 1000000000u / HERTZ), (unsigned long)((firmware_stack_top - to) * sizeof *to));
    fflush(stdout);
    _exit(rc);
}
