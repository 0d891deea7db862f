//! Remembers which addresses were given out for which names, and makes up addresses where there is none to give.

use std::{
    collections::{HashMap, VecDeque},
    net::{IpAddr, Ipv4Addr},
};
use trialrun_policy::Name;

/// Address-and-name pairs kept. A client that connects long after its lookup finds its pair gone only when that many
/// others came in between; time alone does not end a pair, since programs keep addresses longer than their TTL.
const PAIRS: usize = 4096;
/// Made-up addresses come from the benchmark range, which nobody routes: 198.18.0.0/15.
const SYNTHETIC_BASE: u32 = u32::from_be_bytes([198, 18, 0, 0]);
const SYNTHETIC_COUNT: u32 = 1 << 17;

/// The names given out by one stub.
#[derive(Debug, Default)]
pub(crate) struct GivenNames {
    by_address: HashMap<IpAddr, Vec<Name>>,
    order: VecDeque<(IpAddr, Name)>,
    synthetic: HashMap<Name, Ipv4Addr>,
    made_up: u32,
}

impl GivenNames {
    /// Notes that `address` was given out for `name`.
    pub(crate) fn give(&mut self, name: &Name, address: IpAddr) {
        let names = self.by_address.entry(address).or_default();
        if names.contains(name) {
            return;
        }
        names.push(name.clone());
        self.order.push_back((address, name.clone()));
        if self.order.len() > PAIRS
            && let Some((address, name)) = self.order.pop_front()
        {
            self.forget(address, &name);
        }
    }

    fn forget(&mut self, address: IpAddr, name: &Name) {
        if let Some(names) = self.by_address.get_mut(&address) {
            names.retain(|n| n != name);
            if names.is_empty() {
                self.by_address.remove(&address);
            }
        }
        self.synthetic.remove(name);
    }

    /// A made-up address that stands for `name`, the same every time.
    pub(crate) fn synthetic(&mut self, name: &Name) -> IpAddr {
        if let Some(address) = self.synthetic.get(name) {
            return (*address).into();
        }
        // Numbers come round after 131,070 names, when the pairs of long ago are gone.
        self.made_up = self.made_up % (SYNTHETIC_COUNT - 2) + 1;
        let address = Ipv4Addr::from(SYNTHETIC_BASE + self.made_up);
        self.synthetic.insert(name.clone(), address);
        self.give(name, address.into());
        address.into()
    }

    /// The names for which `address` was given out.
    pub(crate) fn of(&self, address: IpAddr) -> Vec<Name> {
        self.by_address.get(&address).cloned().unwrap_or_default()
    }

    /// Whether `address` is one that this table made up.
    pub(crate) fn is_synthetic(&self, address: IpAddr) -> bool {
        let names = self.by_address.get(&address).map(Vec::as_slice).unwrap_or_default();
        names.iter().any(|n| self.synthetic.get(n).is_some_and(|a| IpAddr::V4(*a) == address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    #[test]
    fn two_names_can_share_an_address() {
        let mut names = GivenNames::default();
        let address = "1.1.1.1".parse().unwrap();
        for n in ["a.test", "b.test", "a.test"] {
            names.give(&name(n), address);
        }
        assert_eq!(names.of(address), [name("a.test"), name("b.test")]);
        assert!(!names.is_synthetic(address));
    }

    #[test]
    fn a_made_up_address_is_stable_and_the_table_bounded() {
        let mut names = GivenNames::default();
        let first = names.synthetic(&name("a.test"));
        assert_eq!(names.synthetic(&name("a.test")), first);
        assert!(names.is_synthetic(first));
        for i in 0..2 * PAIRS {
            names.synthetic(&name(&format!("n{i}.test")));
        }
        assert!(!names.is_synthetic(first));
        assert_eq!((names.order.len(), names.by_address.len(), names.synthetic.len()), (PAIRS, PAIRS, PAIRS));
    }
}
