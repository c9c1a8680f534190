//! Large files that come in crumbs and are written in pieces, past the page cache where that goes.

use std::path::Path;
use std::path::PathBuf;

use super::support::key;
use super::support::model;
use super::support::open;
use crate::store::Budget;
use crate::store::CoreState;
use crate::store::CoreWriter;
use crate::store::ExpertWriter;
use crate::store::Filled;
use crate::store::Lookup;
use crate::store::disk::Disk;
use crate::store::disk::How;
use crate::store::disk::RealDisk;
use crate::terms::CorePart;

/// Nothing of it ends where a piece or a page does.
const LEN: usize = (6 << 20) + 1234;
const CRUMB: usize = 54_321;
const CORE: CorePart = CorePart::Layer(4);

fn content() -> Vec<u8> {
    (0..LEN as u32).map(|i| (i % 65_521) as u8).collect()
}

/// Folders on the disk, and on a file system that has no other place than the cache.
fn homes() -> Vec<tempfile::TempDir> {
    let memory = Path::new("/dev/shm");
    let memory = memory
        .is_dir()
        .then(|| tempfile::tempdir_in(memory).unwrap());
    let disk = tempfile::tempdir().unwrap();
    memory.into_iter().chain([disk]).collect()
}

/// A writer's store, and how many bytes stand in the file while it writes.
fn expert(home: &Path, write: impl FnOnce(ExpertWriter)) -> u64 {
    let store = open(home, Budget::Limit(1));
    let model = model(&store);
    model.set_unlimited(true).unwrap();
    let Lookup::Miss(slot) = model.lookup(key(1), LEN as u64) else {
        panic!("it is there")
    };
    write(slot.grow().unwrap());
    length(&model.folder().join("experts/part"))
}

fn length(folder: &Path) -> u64 {
    let files = std::fs::read_dir(folder).unwrap();
    files.map(|f| f.unwrap().metadata().unwrap().len()).sum()
}

fn append(writer: &mut ExpertWriter, upto: usize) {
    let content = content();
    let done = writer.done() as usize;
    for crumb in content[done..upto].chunks(CRUMB) {
        writer.append(crumb).unwrap();
    }
}

#[test]
fn an_expert_in_crumbs_is_whole_after_stops_and_kills() {
    for home in homes() {
        // Stopped in order, all that came is there, however odd.
        let stands = expert(home.path(), |mut writer| append(&mut writer, 1_500_001));
        assert_eq!(stands, 1_500_001);
        // What a kill would leave while it is at work: all but what is less than a piece.
        let part = part(home.path());
        let killed = home.path().join("killed");
        expert(home.path(), |mut writer| {
            assert_eq!(writer.done(), 1_500_001);
            append(&mut writer, 4_000_000);
            std::fs::copy(&part, &killed).unwrap();
        });
        std::fs::rename(&killed, &part).unwrap();
        expert(home.path(), |mut writer| {
            assert_eq!(writer.done(), 3 << 20);
            append(&mut writer, LEN);
            assert_eq!(writer.missing(), 0);
            assert_eq!(writer.finish("test"), Filled::Kept);
        });
        let store = open(home.path(), Budget::Limit(1));
        let Lookup::Hit(lease) = model(&store).lookup(key(1), LEN as u64) else {
            panic!("it was kept")
        };
        assert!(lease.read().unwrap() == content());
    }
}

fn part(home: &Path) -> PathBuf {
    let store = open(home, Budget::Limit(1));
    let folder = model(&store).folder().join("experts/part");
    let mut files = std::fs::read_dir(folder).unwrap();
    files.next().unwrap().unwrap().path()
}

#[test]
fn a_beginning_that_was_wrong_leaves_nothing() {
    for home in homes() {
        expert(home.path(), |mut writer| {
            writer.append(&vec![7; 2_500_000]).unwrap();
            writer.restart().unwrap();
            assert_eq!(writer.done(), 0);
            append(&mut writer, LEN);
            assert_eq!(writer.finish("test"), Filled::Kept);
        });
        let store = open(home.path(), Budget::Limit(1));
        let Lookup::Hit(lease) = model(&store).lookup(key(1), LEN as u64) else {
            panic!("it was kept")
        };
        assert!(lease.read().unwrap() == content());
    }
}

#[test]
fn a_core_file_in_crumbs_is_whole_after_stops() {
    for home in homes() {
        let store = open(home.path(), Budget::Limit(0));
        let writer = || match model(&store).core(CORE, LEN as u64).unwrap() {
            CoreState::Partial(writer) => writer,
            other => panic!("{other:?}"),
        };
        let append = |writer: &mut CoreWriter, upto: usize| {
            let done = writer.done() as usize;
            for crumb in content()[done..upto].chunks(CRUMB) {
                writer.append(crumb).unwrap();
            }
        };
        append(&mut writer(), 2_000_003);
        let mut second = writer();
        assert_eq!(second.done(), 2_000_003);
        append(&mut second, LEN);
        let path = second.finish("test").unwrap();
        assert!(std::fs::read(path).unwrap() == content());
    }
}

#[test]
fn bytes_are_the_same_whichever_way_they_go() {
    for home in homes() {
        // From memory that begins with a page and from some that does not; at a page and beside one.
        for (skip, offset) in [(0, 0), (1, 0), (0, 4096), (1, 4097), (4096, 8192)] {
            let path = home.path().join(format!("{skip}-{offset}"));
            let file = RealDisk.open(&path, How::CreateNew).unwrap();
            let content = content();
            let mut memory = memmap2::MmapMut::map_anon(LEN + skip).unwrap();
            memory[skip..].copy_from_slice(&content);
            file.write_at(b"before", 0).unwrap();
            file.write_at(&memory[skip..], offset).unwrap();
            file.write_at(b"behind", offset + LEN as u64).unwrap();
            let found = std::fs::read(&path).unwrap();
            let (first, rest) = found.split_at(offset as usize);
            assert!(offset == 0 || first.starts_with(b"before"));
            assert!(rest[..LEN] == content, "{skip}, {offset}");
            assert_eq!(&rest[LEN..], b"behind");
            // Back again the same two ways, from a page and from beside one, up to the very end.
            for at in [0, 1, 4096, 1_048_577] {
                let mut back = vec![0; found.len() - at];
                file.read_back(&mut back, at as u64).unwrap();
                assert!(back == found[at..], "{skip}, {offset}: from {at}");
                let beyond = file.read_back(&mut back, at as u64 + 1).unwrap_err();
                assert_eq!(beyond.kind(), std::io::ErrorKind::UnexpectedEof);
            }
        }
    }
}
