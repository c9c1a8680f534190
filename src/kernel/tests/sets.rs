//! Which instruction sets the other tests ran on.

use crate::kernel::Isa;

#[test]
fn every_twin_this_cpu_can_run_is_among_those_tested() {
    let names: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
    let mut want = vec!["scalar"];
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            want.push("avx2");
        }
        if is_x86_feature_detected!("avx512f") {
            want.push("avx512");
        }
    }
    #[cfg(target_arch = "aarch64")]
    want.push("neon");
    assert_eq!(names, want);
    assert_eq!(Isa::best().name(), *want.last().unwrap());
}

#[test]
fn a_name_finds_its_instruction_set_and_no_other() {
    for isa in Isa::available() {
        assert_eq!(Isa::from_name(isa.name()), Some(isa));
    }
    assert_eq!(Isa::from_name("mmx"), None);
}
